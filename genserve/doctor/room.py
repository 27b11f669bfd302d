"""Computes, without a trial, which models fit and how they would take a new version; and the verdicts on that.

On a device, `--gpu-memory-utilization` bounds the live model, what a push needs beside it, activations and a minimal KV
cache. On a CPU everything is in host memory. The host always holds the served bytes and those that arrive: partial
pushes, pulls and restoring a version need the former.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Verdict, fail, info, ok, warn
from genserve.settings.config import CPU_KV_CACHE_BYTES, WAYS, ways
from genserve.worker.contract.placement import ACTIVATION_BYTES, GIB, HOST_FACTOR, RING_BYTES, leaves_enough

BF16_BYTES: Final = 2
KV_TOKENS: Final = 8192
"""Tokens that must fit the KV cache if --max-model-len is not given: one long sequence."""
PROCESS_BYTES: Final = 2 * GIB
"""Assumed size of the daemon's and the engine's processes on the host."""

_USEFUL_PARAMETERS: Final = 0.5e9
_WAYS: Final = {
    "beside": "can take new versions with `beside`, in a pause of milliseconds",
    "host": "can take new versions with `host`, in a longer pause",
    "inplace": "can take new versions with `inplace`, in a longer pause",
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model in bytes, on all ranks together. `largest_bytes` is its largest tensor."""

    name: str
    weight_bytes: float
    largest_bytes: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Available memory of each device (None if the engine runs on the CPU), and of the host."""

    device_bytes: int | None
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """How a model takes new versions: `way` is "beside", "host", "inplace", or "" if it cannot be served here.
    `needed_bytes` and `budget_bytes` are per device, or of the host on a CPU, for this way. If there is none they are
    those of the way that needs least: of the host with `lacks_host`, when the devices have enough."""

    model: str
    way: str
    needed_bytes: float
    budget_bytes: float
    lacks_host: bool = False


def _bf16(name: str, parameters: float, layers: int, kv_heads: int, vocabulary: int, hidden: int) -> ModelSize:
    """Heads of 128; keys and values in bf16."""
    kv_bytes = 2 * layers * kv_heads * 128 * BF16_BYTES
    return ModelSize(name, parameters * BF16_BYTES, vocabulary * hidden * BF16_BYTES, kv_bytes)


TYPICAL: Final = (
    _bf16("8B", 8.03e9, 32, 8, 128_256, 4096),  # Llama 3.1 8B
    _bf16("14B", 14.8e9, 40, 8, 151_936, 5120),  # Qwen3 14B
    _bf16("32B", 32.8e9, 64, 8, 151_936, 5120),  # Qwen3 32B
    _bf16("70B", 70.6e9, 80, 8, 128_256, 8192),  # Llama 3.3 70B
)


def room(model: ModelSize, memory: Memory, flags: ServeFlags) -> Room:
    """The first way that fits, the one with the shortest pause first."""
    needs = _cpu_needs(model, flags) if memory.device_bytes is None else _device_needs(model, flags)
    budget_bytes = _budget_bytes(memory, flags)
    for way, (on_engine, on_host) in needs.items():
        is_taken = way != "beside" or memory.device_bytes is None or _auto_builds_beside(model, budget_bytes, flags)
        if on_engine <= budget_bytes and on_host <= memory.host_bytes and is_taken:
            return Room(model.name, way, on_engine, budget_bytes)
    on_engine, on_host = min(needs.values())
    if on_engine <= budget_bytes:
        return Room(model.name, "", on_host, memory.host_bytes, lacks_host=True)
    return Room(model.name, "", on_engine, budget_bytes)


def fits(way: str, model: ModelSize, memory: Memory, flags: ServeFlags) -> bool:
    """Whether there is memory to serve the model and to take versions in this way, which is one of the device's."""
    needs = _cpu_needs(model, flags) if memory.device_bytes is None else _device_needs(model, flags)
    on_engine, on_host = needs[way]
    return on_engine <= _budget_bytes(memory, flags) and on_host <= memory.host_bytes


def largest_beside(memory: Memory, flags: ServeFlags) -> float:
    """Parameters of the largest bf16 model that fits with `beside`; 0 if there is none."""
    least, most = 0.0, 1e13
    for _ in range(60):
        middle = (least + most) / 2
        if fits("beside", typical(middle), memory, flags):
            least = middle
        else:
            most = middle
    return least


def typical(parameters: float) -> ModelSize:
    """A bf16 model of this size, interpolated between the `TYPICAL` ones and scaled outside of them."""
    weight_bytes = parameters * BF16_BYTES
    sizes = [ModelSize("", 0, 0, 0), *TYPICAL]
    for smaller, larger in pairwise(sizes):
        if weight_bytes <= larger.weight_bytes:
            share = (weight_bytes - smaller.weight_bytes) / (larger.weight_bytes - smaller.weight_bytes)
            largest = smaller.largest_bytes + share * (larger.largest_bytes - smaller.largest_bytes)
            kv = smaller.kv_bytes_per_token + share * (larger.kv_bytes_per_token - smaller.kv_bytes_per_token)
            return ModelSize(_name(parameters), weight_bytes, largest, kv)
    factor = weight_bytes / sizes[-1].weight_bytes
    return ModelSize(
        _name(parameters), weight_bytes, factor * sizes[-1].largest_bytes, factor * sizes[-1].kv_bytes_per_token
    )


def _auto_builds_beside(model: ModelSize, budget_bytes: float, flags: ServeFlags) -> bool:
    """Whether `--weight-update auto` takes `beside`: it leaves a margin, where `beside` itself would use all memory."""
    weights = model.weight_bytes / flags.num_ranks
    needed = weights + model.largest_bytes / flags.tensor_parallel_size
    return leaves_enough(needed, budget_bytes - weights)


def _device_needs(model: ModelSize, flags: ServeFlags) -> Mapping[str, tuple[float, float]]:
    """Needed bytes of each device, and of the host, by way."""
    weights = model.weight_bytes / flags.num_ranks
    # A large tensor is an embedding or a head: tensor-parallel ranks have a part of it, pipeline ranks all of it.
    bounce = model.largest_bytes / flags.tensor_parallel_size
    least = weights + bounce + ACTIVATION_BYTES + _kv_bytes(model, flags) / flags.num_ranks
    host = 2 * model.weight_bytes + RING_BYTES * flags.num_workers + PROCESS_BYTES
    staged = HOST_FACTOR * model.weight_bytes * flags.data_parallel_size
    needs = ((least + weights, host), (least, host + staged), (least, host))
    return dict(zip(WAYS, needs, strict=True))


def _cpu_needs(model: ModelSize, flags: ServeFlags) -> Mapping[str, tuple[float, float]]:
    """As `_device_needs`, on a CPU, where the device's memory is the host's."""
    kv = CPU_KV_CACHE_BYTES if flags.kv_cache_bytes is None else flags.kv_cache_bytes
    models = flags.data_parallel_size
    served = (2 + models) * model.weight_bytes + kv * flags.num_workers + PROCESS_BYTES
    needs = (
        (served + HOST_FACTOR * models * model.weight_bytes, 0.0),
        (served + 2 * models * model.largest_bytes, 0.0),
    )
    return dict(zip(ways("cpu"), needs, strict=True))


def _kv_bytes(model: ModelSize, flags: ServeFlags) -> float:
    """The size of the minimal KV cache, on all ranks together."""
    if flags.kv_cache_bytes is not None:
        return flags.kv_cache_bytes * flags.num_ranks  # the flag is per rank
    tokens = KV_TOKENS if flags.max_model_len is None else flags.max_model_len
    return tokens * model.kv_bytes_per_token


def _budget_bytes(memory: Memory, flags: ServeFlags) -> float:
    if memory.device_bytes is None:
        return memory.host_bytes
    return flags.gpu_memory_utilization * memory.device_bytes


def _name(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B"


def room_verdicts(memory: Memory, flags: ServeFlags, own: ModelSize | None) -> Iterator[Verdict]:
    """The largest model, models of usual sizes, and the user's model if there is one. Computed without a trial."""
    parameters = largest_beside(memory, flags)
    at = f" at --gpu-memory-utilization {flags.gpu_memory_utilization:g}" if memory.device_bytes is not None else ""
    ranks = f", {flags.num_ranks} ranks" if flags.num_ranks > 1 else ""
    figures = {"parameters": parameters, "num_ranks": flags.num_ranks}
    if parameters < _USEFUL_PARAMETERS:
        finding = f"no model of 0.5 B parameters in bf16 fits with `beside`{at}{ranks}"
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
        return f"does not fit: {needed:.1f} GiB{of_host} are needed, {there:.1f} are available"
    return f"{_WAYS[found.way]} ({share})"


def _advice(memory: Memory, lacks_host: bool = False) -> str:
    if lacks_host or memory.device_bytes is None:
        return "Add host memory, or serve a smaller model."
    return "Spread it over more devices with --tensor-parallel-size, or raise --gpu-memory-utilization."
