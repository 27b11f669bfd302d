"""The whole checkup, in order: the machine, a daemon for each way to take new versions, and which models fit."""

import signal
import tempfile
import time
from asyncio import current_task, get_running_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genserve.doctor.children import Children
from genserve.doctor.machine import facts as machine
from genserve.doctor.machine.facts import MachineFacts
from genserve.doctor.machine.verdicts import machine_verdicts
from genserve.doctor.room import Memory, ModelSize, fits, room_verdicts
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.trial import own_model, tiny_model
from genserve.doctor.trial.exercise import Subject, exercise
from genserve.doctor.trial.findings import WayFound
from genserve.doctor.trial.verdicts import cold_starts, way_verdicts
from genserve.doctor.verdict import Section, Verdict, fail, warn
from genserve.errors import InvalidFieldError
from genserve.settings.config import ways

_TINY_PUSHES: Final = 5
_OWN_PUSHES: Final = 4
_TINY_KV_BYTES: Final = 256 << 20
_TINY_UTILIZATION: Final = 0.5


@dataclass(frozen=True, slots=True)
class CheckupOptions:
    """What to check. `model` is None for the built-in model; `asked_ways` is None for all ways."""

    model: str | None
    asked_ways: str | None
    flags: ServeFlags
    timeout_s: float
    machine_only: bool


async def check_up(
    options: CheckupOptions, children: Children, say: Callable[[str], None], show: Callable[[Section], None]
) -> tuple[list[Section], dict[str, Any]]:
    """Calls `show` with each section when it is known, and `say` before steps that take time. Returns all sections and
    the facts.

    Raises InvalidFieldError for an invalid model or way, before a daemon is started; OSError.
    """
    chosen_ways(options.asked_ways, "cuda")
    own = None if options.model is None else own_model.checkpoints(options.model)
    size = None if options.model is None or own is None else own_model.size_of(options.model, own["a"])
    sections: list[Section] = []

    def add(title: str, verdicts: Iterator[Verdict]) -> None:
        sections.append(Section(title, tuple(verdicts)))
        show(sections[-1])

    with _cancelled_by_signals():
        say("looking at the machine")
        facts = await machine.look(children, options.timeout_s)
        chosen = chosen_ways(options.asked_ways, facts.device_type)
        add("machine", machine_verdicts(facts, options.flags))
        memory = _memory(facts)
        raw: dict[str, Any] = {"machine": facts.as_dict(), "serve_flags": list(options.flags.passed_on)}
        if not options.machine_only:
            that_fit = _that_fit(chosen, size, memory, options)
            try:
                with tempfile.TemporaryDirectory(prefix="genserve-doctor-", ignore_cleanup_errors=True) as scratch:
                    subject = _subject(options, own, facts, Path(scratch))
                    found = await _try_ways(options, subject, that_fit, children, Path(scratch), say)
            except OSError as error:
                found, chosen = [], ()
                add("daemons", iter([_no_files(error)]))
            cold = cold_starts(found)
            own_bytes = 0.0 if size is None else size.weight_bytes / options.flags.num_ranks
            for each in found:
                verdicts = way_verdicts(each, cold, expect_cold=options.model is None, own_bytes=own_bytes)
                add(f"--weight-update {each.way}" if each.way else f"cold start on {each.started_on}", verdicts)
            for way in chosen:
                if all(each.way != way for each in found):
                    not_tried = warn("start", "not tried: there is no room for your model", "See `your model` below.")
                    add(f"--weight-update {way}", iter([not_tried]))
            raw["daemons"] = [{"way": each.way, "started_on": each.started_on, **each.info} for each in found]
        add("what fits (computed)", room_verdicts(memory, options.flags, size))
    return sections, raw


async def _try_ways(
    options: CheckupOptions,
    subject: Subject,
    chosen: Sequence[str],
    children: Children,
    scratch: Path,
    say: Callable[[str], None],
) -> list[WayFound]:
    """One daemon for each way. They start on one checkpoint and the other in turn, if both can be started on: each is
    the cold start that the others are compared with. A last daemon starts on the checkpoint that no other did."""
    names, found = list(subject.directories), []
    for number, way in enumerate(chosen):
        name = names[number % len(names)]
        say(f"serving {name} with --weight-update {way}")
        began_s = time.monotonic()
        found.append(await exercise(subject, way, name, children, scratch, options.timeout_s))
        say(f"done after {time.monotonic() - began_s:.0f} s")
    cold = cold_starts(found)
    if any(each.pushed for each in found):
        for name in names:
            if name not in cold:
                say(f"serving {name}, to compare with")
                found.append(await exercise(subject, "", name, children, scratch, options.timeout_s))
    return found


def _subject(
    options: CheckupOptions, own: Mapping[str, tiny_model.Checkpoint] | None, facts: MachineFacts, scratch: Path
) -> Subject:
    if own is not None and options.model is not None:
        started = {"a": Path(options.model)}
        return Subject(own, started, options.flags.passed_on, _OWN_PUSHES, False, options.flags.max_requests)
    tensors = tiny_model.checkpoints(options.flags.tensor_parallel_size)
    directories = {name: tiny_model.write(scratch / name, each) for name, each in tensors.items()}
    flags = ["--max-model-len", str(tiny_model.MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(_TINY_KV_BYTES)]
    flags += ["--max-num-seqs", "32"]
    if facts.devices:
        # Little memory is enough, also where other processes hold most of the device: vLLM requires that much to be
        # free.
        share = min(device.free_bytes / device.total_bytes for device in facts.devices)
        flags += ["--gpu-memory-utilization", f"{min(_TINY_UTILIZATION, 0.9 * share):.3f}"]
    flags += options.flags.passed_on
    return Subject(tensors, directories, flags, _TINY_PUSHES, True, options.flags.max_requests)


def _memory(facts: MachineFacts) -> Memory:
    devices = [device.total_bytes for device in facts.devices]
    return Memory(min(devices) if devices else None, facts.host.available_bytes)


def _that_fit(chosen: Sequence[str], own: ModelSize | None, memory: Memory, options: CheckupOptions) -> list[str]:
    """The ways in which the model fits. All are tried for the built-in model, because a machine without memory for it
    is not checked."""
    return [way for way in chosen if own is None or fits(way, own, memory, options.flags)]


def _no_files(error: OSError) -> Verdict:
    """The trials with daemons need a few megabytes on a disk."""
    place = tempfile.tempdir or "no directory for temporary files"
    return fail(
        "temporary files", f"{place}: {error}", "Free a few megabytes there, or set TMPDIR to another directory."
    )


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Makes SIGTERM and the end of the terminal act as Ctrl-C: no process may be left behind."""
    loop, task = get_running_loop(), current_task()
    assert task is not None
    # Under nohup, SIGHUP stays ignored.
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def chosen_ways(asked: str | None, device_type: str) -> tuple[str, ...]:
    """The requested checkup, separated by commas, or all that the device has. Raises InvalidFieldError."""
    known = ways(device_type)
    if asked is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in known:
            raise InvalidFieldError.of("ways", f"{name!a} is not one of {', '.join(known)}")
    return names
