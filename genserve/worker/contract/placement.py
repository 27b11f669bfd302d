"""Where a new version is built, what it takes of the device, and what it costs in pause. Pure.

beside   on the device, next to the live one: memory for a second model, the shortest pause
host     in CPU memory, and copied over in the pause
inplace  layer by layer over the live one, in the pause: memory for the largest layer, and no way back
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from genserve.settings.config import WAYS

GIB: Final = 1 << 30
HOST_MARGIN_BYTES: Final = 512 << 20
"""Memory that stays free for everything else on the host."""

HOST_FACTOR: Final = 1.1
"""Memory of a version that is built on the host, relative to the size of the model."""

ACTIVATION_BYTES: Final = 2 * GIB
"""Assumed memory of a device for activations and captured graphs, beside weights, keys and values."""

RING_BYTES: Final = 256 << 20
"""Pinned CPU memory through which each rank's weights reach its device; `update.pinned_ring` allocates it."""

_KEPT_SHARE: Final = 3
"""`beside` must leave at least one part in this many of the memory that keys and values would have without a second
model."""

# Assumptions for computed pauses, of an H100 on PCIe 5; none was measured.
_DEVICE_BYTES_PER_S: Final = 1.5e12  # a copy within the device
_HOST_BYTES_PER_S: Final = 25e9  # a copy between the device and the CPU, through the pinned ring; in each direction


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that a worker has when its model is loaded. `weight_bytes`: of the live model; `largest_bytes`: of its
    largest tensor; `left_bytes`: of the device for keys, values and activations, without any reserve, None where the
    device is the CPU; `cpu_bytes`: of CPU memory, available to this rank; `quantization`: of the weights, None for
    plain ones; `is_online`: they are quantised as they are loaded; `kv_cache_bytes`: what --kv-cache-memory-bytes
    takes, which is not in `left_bytes`, 0 where it is not given."""

    weight_bytes: int
    largest_bytes: int
    left_bytes: int | None
    cpu_bytes: int
    quantization: str | None = None
    is_online: bool = False
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The way that a worker takes new versions, and a sentence for the log that says why."""

    way: str
    reason: str


def place(asked: str, facts: WorkerFacts) -> Placement:
    """The way for the requested --weight-update. Raises ValueError if it is not possible, naming the possible ways."""
    left = facts.left_bytes
    if left is None:
        return _on_cpu(asked, facts)
    lacking = {way: why for way in WAYS if (why := _lacking(way, facts, left)) is not None}
    possible = [way for way in WAYS if way not in lacking]
    if asked in lacking:
        advice = [f"take --weight-update {way}" for way in possible]
        advice += _remedies([asked] if possible else list(lacking), facts, left)
        raise ValueError(f"--weight-update {asked} {lacking[asked]}: {', or '.join(advice)}")
    if not possible:
        whys = "; ".join(f"{way} {why}" for way, why in lacking.items())
        remedies = ", or ".join(_remedies(list(lacking), facts, left))
        raise ValueError(f"--weight-update auto finds no way for this model: {whys}: {remedies}")
    way = possible[0] if asked == "auto" else asked
    if asked == "auto" and way == "beside" and len(possible) > 1 and not leaves_enough(_needed(facts), left):
        lacking["beside"] = f"takes {_of_the_device(facts, left)}, which leaves too little for keys and values"
        way = possible[1]
    return Placement(way, _reason(way, asked, facts, left, lacking, possible))


def _lacking(way: str, facts: WorkerFacts, left: int) -> str | None:
    """Why a way is not possible with `left` bytes of the device, as a verb and what follows it; None if it is."""
    if (why := refusal(facts.quantization, way, is_online=facts.is_online)) is not None:
        return f"cannot be taken, as {why}"
    if way == "beside" and _needed(facts) + ACTIVATION_BYTES > left:
        return f"needs {_of_the_device(facts, left)}, and {_gib(ACTIVATION_BYTES)} for activations and graphs"
    if way == "host" and HOST_FACTOR * facts.weight_bytes + HOST_MARGIN_BYTES > facts.cpu_bytes:
        return (
            f"needs {_gib(HOST_FACTOR * facts.weight_bytes)} of the {_gib(facts.cpu_bytes)} that the host has for this "
            f"rank, and {_gib(HOST_MARGIN_BYTES)} for everything else"
        )
    return None


def _remedies(ways: Sequence[str], facts: WorkerFacts, left: int) -> list[str]:
    """What else makes those ways possible. Nothing that the daemon would refuse: weights that are quantised as they are
    loaded may not be spread over more devices."""
    remedies = []
    if "beside" in ways:
        if _needed(facts) + ACTIVATION_BYTES < left + facts.kv_cache_bytes:
            remedies.append("lower --kv-cache-memory-bytes")
        remedies.append("take a device with more memory" if facts.is_online else "take more devices")
    if "host" in ways and facts.quantization is None:
        remedies.append("take a host with more memory")
    if "inplace" in ways and facts.is_online:
        remedies.append("take a checkpoint that is quantised already")
    return remedies


def _reason(
    way: str, asked: str, facts: WorkerFacts, left: int, lacking: Mapping[str, str], possible: Sequence[str]
) -> str:
    """A sentence for the log. `possible`: other possible values of --weight-update."""
    pause = f"a push pauses for about {duration(pause_s(way, facts.weight_bytes))} (computed)"
    others = [f"{each} {lacking[each]}" for each in WAYS[: WAYS.index(way)] if each in lacking]
    why = "as --weight-update says" if asked == way else f"as {'; '.join(others)}"
    if way == "beside":
        gives = "; --weight-update host gives that memory to keys and values" if "host" in possible else ""
        kept = _of_the_device(facts, left)
        return f"new versions are built on the device, which keeps {kept} for them; {pause}{gives}"
    if way == "host":
        shortens = "--weight-update beside shortens" if "beside" in possible else "more devices would shorten"
        size = _gib(facts.weight_bytes)
        return f"new versions are built in {size} of the host's memory, {why}; {pause}; {shortens} that"
    healed = "one that fails there is healed by another load"
    shortens = "; --weight-update beside shortens that" if "beside" in possible else ""
    return f"new versions are loaded over the live one, {why}; {pause}, and {healed}{shortens}"


def _needed(facts: WorkerFacts) -> int:
    """Device memory that `beside` needs, in bytes."""
    return facts.weight_bytes + facts.largest_bytes


def _of_the_device(facts: WorkerFacts, left: int) -> str:
    return f"{_gib(_needed(facts))} of the {_gib(left)} that the device has left beside the weights"


def leaves_enough(needed: float, left: float) -> bool:
    """Whether `auto` takes `beside`: whether `needed` leaves enough of the memory that is `left` beside the weights."""
    return (left - needed) * _KEPT_SHARE >= left


def pause_s(way: str, weights: int) -> float:
    """How long copies stop generation on a GPU, in seconds, for this many bytes on each GPU: three copies within the
    device, one to the host and one back at the same time, or one to the device. Add the running step, about 20 ms."""
    return {
        "beside": 3 * weights / _DEVICE_BYTES_PER_S,
        "host": weights / _HOST_BYTES_PER_S,
        "inplace": weights / _HOST_BYTES_PER_S,
    }[way]


def refusal(quantization: str | None, way: str, *, is_online: bool) -> str | None:
    """Why weights of this quantisation cannot be taken in this way on an accelerator; None if they can.

    `quantization` and `is_online` as in WorkerFacts. `way`: beside = built on the device, host = built on the CPU and
    copied to the device, inplace = built on the device layer by layer, from a structure on the CPU.
    """
    if quantization is None or way == "beside":
        return None
    if way == "host":
        return (
            f"weights in {quantization} are packed by kernels of the device, which a version that is built on the host "
            "cannot use"
        )
    if way == "inplace" and is_online:
        return (
            f"weights are quantised to {quantization} as they are loaded, on the device that the structure of the "
            "model is on, and in place that is the host"
        )
    return None


def _on_cpu(asked: str, facts: WorkerFacts) -> Placement:
    needed = HOST_FACTOR * facts.weight_bytes + HOST_MARGIN_BYTES
    if asked == "beside" or (asked == "auto" and needed <= facts.cpu_bytes):
        return Placement("beside", "new versions are built next to the live one and exchanged with it")
    lacking = f"a second model needs {_gib(needed)} of memory, and {_gib(facts.cpu_bytes)} is available"
    why = "as --weight-update says" if asked == "inplace" else f"as {lacking}"
    return Placement("inplace", f"new versions are loaded over the live one, in a longer pause, {why}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def duration(seconds: float) -> str:
    """The duration for people."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
