"""Verdicts on which models fit."""

from collections.abc import Iterator
from typing import Final

from genserve.doctor.room.size import TYPICAL, Memory, ModelSize, Room, largest_beside, room
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Verdict, fail, info, ok, warn
from genserve.worker.contract.placement import GIB

_USEFUL_PARAMETERS: Final = 0.5e9
_WAYS: Final = {
    "beside": "can take new versions with `beside`, in a pause of milliseconds",
    "host": "can take new versions with `host`, in a longer pause",
    "inplace": "can take new versions with `inplace`, in a longer pause",
}


def room_verdicts(memory: Memory, flags: ServeFlags, own: ModelSize | None) -> Iterator[Verdict]:
    """The largest model, models of usual sizes, and the user's model if there is one. Computed without a trial."""
    parameters = largest_beside(memory, flags)
    at = f" at --gpu-memory-utilization {flags.gpu_memory_utilization:g}" if memory.device_bytes is not None else ""
    ranks = f", {flags.num_ranks} ranks" if flags.num_ranks > 1 else ""
    figures = {"parameters": parameters, "num_ranks": flags.num_ranks}
    if parameters < _USEFUL_PARAMETERS:
        finding = f"`beside` fits no model of 0.5 B parameters in bf16{at}{ranks}"
        yield warn("largest beside", finding, _advice(memory), **figures)
    else:
        finding = f"about {parameters / 1e9:.0f} B parameters in bf16{at}{ranks}"
        yield ok("largest beside", finding, **figures)
    for model in TYPICAL:
        found = room(model, memory, flags)
        yield info(f"{model.name} in bf16", _words(found), way=found.way, needed_bytes=found.needed_bytes)
    if own is not None:
        yield own_verdict(room(own, memory, flags), memory)


def own_verdict(found: Room, memory: Memory) -> Verdict:
    """The verdict on the user's model."""
    figures = {"way": found.way, "needed_bytes": found.needed_bytes, "budget_bytes": found.budget_bytes}
    if found.way == "":
        return fail("your model", _words(found), _advice(memory, found.lacks_host), **figures)
    if found.way != "beside":
        return warn("your model", _words(found), _advice(memory), **figures)
    return ok("your model", _words(found), **figures)


def _words(found: Room) -> str:
    share = f"{found.needed_bytes / GIB:.1f} of {found.budget_bytes / GIB:.1f} GiB"
    if found.way == "":
        of_host = " of the host's memory" if found.lacks_host else ""
        needed, there = found.needed_bytes / GIB, found.budget_bytes / GIB
        return f"does not fit: {needed:.1f} GiB{of_host} are needed, {there:.1f} are there"
    return f"{_WAYS[found.way]} ({share})"


def _advice(memory: Memory, lacks_host: bool = False) -> str:
    if lacks_host or memory.device_bytes is None:
        return "Add host memory, or serve a smaller model."
    return "Spread it over more devices with --tensor-parallel-size, or raise --gpu-memory-utilization."
