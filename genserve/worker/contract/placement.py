"""Where a new version is built, what it takes of the device, and what it costs in pause. Pure.

beside   on the device, next to the live one: memory for a second model, the shortest pause
host     in the host's memory, and copied over in the pause
inplace  layer by layer over the live one, in the pause: memory for the largest layer, and no way back
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from genserve.config import WAYS

GIB: Final = 1 << 30
HOST_MARGIN_BYTES: Final = 512 << 20
"""Left to everything else when a place on the host is looked for."""

HOST_FACTOR: Final = 1.1
"""What a version that is built in the host's memory takes there, in sizes of the model."""

ACTIVATION_BYTES: Final = 2 * GIB
"""Assumed of a device for activations and captured graphs, beside weights, keys and values."""

RING_BYTES: Final = 256 << 20
"""Pinned memory of the host through which each rank's weights reach its device; `update.pinned_ring` allocates it."""

_KEPT_SHARE: Final = 3
"""What is left for keys and values shall be at least one in so many of what there was without a second model."""

# What the pauses are computed from, for an H100 on PCIe 5; none of it was measured.
_DEVICE_BYTES_PER_S: Final = 1.5e12  # a copy within the device
_HOST_BYTES_PER_S: Final = 25e9  # a copy between the device and the host, through the pinned ring; in each direction


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker knows when its model is loaded, in bytes. `weights`: the live model; `largest`: its largest tensor;
    `left`: of the device for keys, values and activations, without any reserve; None on the CPU, where all memory is
    the host's; `host`: available to this rank on the host; `quantization`: of the weights, None for plain ones;
    `is_online`: they are quantised as they are loaded; `kv_cache`: what --kv-cache-memory-bytes takes, which is not in
    `left`, 0 where it is not given."""

    weights: int
    largest: int
    left: int | None
    host: int
    quantization: str | None = None
    is_online: bool = False
    kv_cache: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The way that a worker takes new versions, and why, in a sentence for the log."""

    way: str
    reason: str


def place(asked: str, facts: Facts) -> Placement:
    """The way for what --weight-update asks for. Raises ValueError for one that cannot be had, with those that can."""
    if facts.left is None:
        return _on_cpu(asked, facts)
    lacking = {way: why for way in WAYS if (why := _lacking(way, facts, facts.left)) is not None}
    possible = [way for way in WAYS if way not in lacking]
    if asked in lacking:
        advice = [f"take --weight-update {way}" for way in possible]
        advice += _remedies([asked] if possible else list(lacking), facts, facts.left)
        raise ValueError(f"--weight-update {asked} {lacking[asked]}: {', or '.join(advice)}")
    if not possible:
        whys = "; ".join(f"{way} {why}" for way, why in lacking.items())
        remedies = ", or ".join(_remedies(list(lacking), facts, facts.left))
        raise ValueError(f"--weight-update auto finds no way for this model: {whys}: {remedies}")
    way = possible[0] if asked == "auto" else asked
    if asked == "auto" and way == "beside" and len(possible) > 1 and not leaves_enough(_needed(facts), facts.left):
        lacking["beside"] = f"takes {_of_the_device(facts, facts.left)}, which leaves too little for keys and values"
        way = possible[1]
    return Placement(way, _reason(way, asked, facts, facts.left, lacking, possible))


def _lacking(way: str, facts: Facts, left: int) -> str | None:
    """Why a way cannot be had on a device that has so much left, as a verb and what follows it; None if it can."""
    if (why := refusal(facts.quantization, way, is_online=facts.is_online)) is not None:
        return f"cannot be taken, as {why}"
    if way == "beside" and _needed(facts) + ACTIVATION_BYTES > left:
        return f"needs {_of_the_device(facts, left)}, and {_gib(ACTIVATION_BYTES)} for activations and graphs"
    if way == "host" and HOST_FACTOR * facts.weights + HOST_MARGIN_BYTES > facts.host:
        return (
            f"needs {_gib(HOST_FACTOR * facts.weights)} of the {_gib(facts.host)} that the host has for this rank, and "
            f"{_gib(HOST_MARGIN_BYTES)} for everything else"
        )
    return None


def _remedies(ways: Sequence[str], facts: Facts, left: int) -> list[str]:
    """What else makes those ways possible, of which nothing is refused: weights that are quantised as they are loaded
    may not be spread over more devices."""
    remedies = []
    if "beside" in ways:
        if _needed(facts) + ACTIVATION_BYTES < left + facts.kv_cache:
            remedies.append("lower --kv-cache-memory-bytes")
        remedies.append("take a device with more memory" if facts.is_online else "take more devices")
    if "host" in ways and facts.quantization is None:
        remedies.append("take a host with more memory")
    if "inplace" in ways and facts.is_online:
        remedies.append("take a checkpoint that is quantised already")
    return remedies


def _reason(way: str, asked: str, facts: Facts, left: int, lacking: Mapping[str, str], possible: Sequence[str]) -> str:
    """In a sentence for the log. `possible`: what --weight-update may say as well."""
    pause = f"a push pauses for about {duration(pause_s(way, facts.weights))} (computed)"
    others = [f"{each} {lacking[each]}" for each in WAYS[: WAYS.index(way)] if each in lacking]
    why = "as --weight-update says" if asked == way else f"as {'; '.join(others)}"
    if way == "beside":
        gives = "; --weight-update host gives that memory to keys and values" if "host" in possible else ""
        kept = _of_the_device(facts, left)
        return f"new versions are built on the device, which keeps {kept} for them; {pause}{gives}"
    if way == "host":
        shortens = "--weight-update beside shortens" if "beside" in possible else "more devices would shorten"
        return f"new versions are built in {_gib(facts.weights)} of the host's memory, {why}; {pause}; {shortens} that"
    healed = "one that fails there is healed by another load"
    shortens = "; --weight-update beside shortens that" if "beside" in possible else ""
    return f"new versions are loaded over the live one, {why}; {pause}, and {healed}{shortens}"


def _needed(facts: Facts) -> int:
    """Of the device, by beside."""
    return facts.weights + facts.largest


def _of_the_device(facts: Facts, left: int) -> str:
    return f"{_gib(_needed(facts))} of the {_gib(left)} that the device has left beside the weights"


def leaves_enough(needed: float, left: float) -> bool:
    """Whether `auto` builds beside: what is `needed` for that leaves enough of what is `left` beside the weights."""
    return (left - needed) * _KEPT_SHARE >= left


def pause_s(way: str, weights: int) -> float:
    """How long copies stop generation on a GPU, in seconds, for so many bytes on each: three copies within the device,
    one to the host and one back at the same time, or one to the device. The step that is under way comes on top, some
    20 ms."""
    return {
        "beside": 3 * weights / _DEVICE_BYTES_PER_S,
        "host": weights / _HOST_BYTES_PER_S,
        "inplace": weights / _HOST_BYTES_PER_S,
    }[way]


def refusal(quantization: str | None, way: str, *, is_online: bool) -> str | None:
    """Why weights of this quantisation cannot be taken in this way on an accelerator, None if they can. `quantization`
    and `is_online` as in Facts; `way`: beside = built on the device, host = built on the host and copied to the device,
    inplace = built on the device layer by layer, from a structure on the host."""
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


def _on_cpu(asked: str, facts: Facts) -> Placement:
    needed = HOST_FACTOR * facts.weights + HOST_MARGIN_BYTES
    if asked == "beside" or (asked == "auto" and needed <= facts.host):
        return Placement("beside", "new versions are built next to the live one and exchanged with it")
    lacking = f"a second model needs {_gib(needed)} of memory, and {_gib(facts.host)} is available"
    why = "as --weight-update says" if asked == "inplace" else f"as {lacking}"
    return Placement("inplace", f"new versions are loaded over the live one, in a longer pause, {why}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def duration(seconds: float) -> str:
    """As people read it."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
