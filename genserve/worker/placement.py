"""Where a new version is built, what it takes of the device, and what it costs in pause. Pure.

beside   on the device, next to the live one: memory for a second model, the shortest pause
host     in the host's memory, and copied over in the pause
inplace  layer by layer over the live one, in the pause: memory for the largest layer, and no way back
"""

from dataclasses import dataclass
from typing import Final

WAYS: Final = ("beside", "host", "inplace")

GIB: Final = 1 << 30
HOST_MARGIN_BYTES: Final = 512 << 20
"""Left to everything else when a place on the host is looked for."""

LEAST_LEFT_BYTES: Final = 2 * GIB
"""Of a device, to activations, graphs and the least KV cache."""

_KEPT_SHARE: Final = 3
"""What is left for keys and values shall be at least one in so many of what there was without a second model."""

# What the pauses are computed from, for an H100 on PCIe 5; none of it was measured.
_DEVICE_BYTES_PER_S: Final = 1.5e12  # a copy within the device
_HOST_BYTES_PER_S: Final = 25e9  # a copy between the device and the host, through the pinned ring; in each direction


# vLLM's names for quantisation while loading (config/quantization.py _ONLINE_SHORTHANDS), "online" among them.
ONLINE_QUANTIZATIONS: Final = frozenset(
    {
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "mxfp8",
        "mxfp4",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "online",
        "experts_int8",
    }
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker knows when its model is loaded, in bytes. `weights`: the live model; `largest`: its largest tensor;
    `left`: of the device for keys, values and activations, without any reserve; None on the CPU, where all memory is
    the host's; `host`: available to this rank on the host; `quantization`: of the weights, None for plain ones;
    `is_online`: they are quantised as they are loaded."""

    weights: int
    largest: int
    left: int | None
    host: int
    quantization: str | None = None
    is_online: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The way that a worker takes new versions, and why, in a sentence for the log."""

    way: str
    reason: str


def place(asked: str, facts: Facts) -> Placement:
    """The way for what --weight-update asks for. Raises ValueError, naming the flag's other values, for one that cannot
    be had."""
    if facts.left is None:
        return _on_cpu(asked, facts)
    needed = facts.weights + facts.largest
    fits_device = needed + LEAST_LEFT_BYTES <= facts.left
    is_worth_it = fits_device and leaves_enough(needed, facts.left)
    fits_host = 1.1 * facts.weights + HOST_MARGIN_BYTES <= facts.host
    refused = {
        way: text for way in WAYS if (text := refusal(facts.quantization, way, is_online=facts.is_online)) is not None
    }
    if asked in refused:
        raise ValueError(f"--weight-update {asked}: {refused[asked]}")
    device_text = f"{_gib(needed)} of the {_gib(facts.left)} that the device has left beside the weights"
    if asked == "beside" and not fits_device:
        raise ValueError(f"--weight-update beside needs {device_text}: take host or inplace, or more devices")
    if asked == "host" and not fits_host:
        raise ValueError(
            f"--weight-update host needs {_gib(1.1 * facts.weights)} of the host's memory for each rank, and "
            f"{_gib(facts.host)} is available: take inplace, or a host with more memory"
        )
    is_only = fits_device and refused.keys() == {"host", "inplace"}
    if asked == "beside" or (asked == "auto" and (is_worth_it or is_only)):
        return Placement(
            "beside",
            f"new versions are built on the device, which keeps {device_text} for them; a push pauses for about "
            f"{duration(pause_s('beside', facts.weights))} (computed)"
            + ("" if "host" in refused else "; --weight-update host gives that memory to keys and values"),
        )
    if asked == "host" or (asked == "auto" and fits_host and "host" not in refused):
        return Placement(
            "host",
            f"new versions are built in {_gib(facts.weights)} of the host's memory, as beside would take "
            f"{device_text}; a push pauses for about {duration(pause_s('host', facts.weights))} (computed); "
            f"{'--weight-update beside shortens' if fits_device else 'more devices would shorten'} that",
        )
    if "inplace" in refused:
        raise ValueError(f"beside takes {device_text}, and {refused['inplace']}")
    return Placement(
        "inplace",
        f"new versions are loaded over the live one, as beside would take {device_text} and host "
        f"{_gib(1.1 * facts.weights)} of the {_gib(facts.host)} that the host has for this rank; a push pauses for "
        f"about {duration(pause_s('inplace', facts.weights))} (computed), and one that fails there is healed by "
        "another load",
    )


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
            "cannot use: leave room for a second model on the device (lower "
            "--kv-cache-memory-bytes), or take --weight-update inplace"
        )
    if way == "inplace" and is_online:
        return (
            f"weights are quantised to {quantization} as they are loaded, on the device that the structure of the "
            "model is on, and in place that is the host: leave room for a second model on the device, or serve a "
            "checkpoint that is quantised already"
        )
    return None


def _on_cpu(asked: str, facts: Facts) -> Placement:
    needed = 1.1 * facts.weights + HOST_MARGIN_BYTES
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
