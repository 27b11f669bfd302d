"""What is pushed on a GPU, in which ways, and what has to happen: data for tests/gpu, and for
tests/engine/test_kinds.py, which holds it against vLLM without a GPU."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import kinds, models, quantised, vision

WAYS = ("beside", "host", "inplace")
MODES: Mapping[str, tuple[str, ...]] = {"graphs": (), "eager": ("--enforce-eager",)}

_ON_HOST = "packed by kernels of the device, which a version that is built on the host cannot use"
_ONLINE = "as they are loaded, on the device that the structure of the model is on, and in place that is the host"
_HIDDEN = "weights cannot be pushed into this model: a push would leave "
_PACKED: Mapping[str, str] = {"host": _ON_HOST}

Pair = tuple[Path, Path]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model. `make` writes two checkpoints, a and b, into a directory; `flags` are the daemon's; `refused`
    says, by way, what the daemon's last line has when it does not start; what is not there is served. `capability` is
    the least compute capability of a GPU that vLLM has kernels for. `unloaded` is why vLLM's CPU backend does not load
    it, "" if it does; with `needs_amx` it knows kernels for it on a CPU with AMX only."""

    name: str
    make: Callable[[Path], Pair]
    flags: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    capability: tuple[int, int] = (8, 0)
    unloaded: str = ""
    needs_amx: bool = False


def _perturbed(make: Callable[..., Path], **options: object) -> Callable[[Path], Pair]:
    """b is a with noise."""

    def both(directory: Path) -> Pair:
        a = make(directory / "a", seed=0, **options)
        return a, models.perturbed(a, directory / "b", seed=1, scale=0.5)

    return both


def _reseeded(make: Callable[..., Path], **options: object) -> Callable[[Path], Pair]:
    """b is made from other random numbers: it is stored in types to which no noise can be added."""
    return lambda directory: (make(directory / "a", seed=0, **options), make(directory / "b", seed=1, **options))


def _packed(pack: Callable[[Path, Path], Path]) -> Callable[[Path], Pair]:
    """Dense checkpoints, quantised; sizes are multiples of what kernels take at a time."""

    def both(directory: Path) -> Pair:
        plain = _perturbed(models.tiny_qwen3, hidden=256, head_dim=64, tie=False)(directory / "plain")
        a, b = (pack(source, directory / source.name) for source in plain)
        return a, b

    return both


KINDS: tuple[Kind, ...] = (
    Kind("dense", _perturbed(models.tiny_qwen3)),
    Kind("dense-with-biases", _perturbed(models.tiny_qwen2)),
    Kind("experts", _perturbed(models.tiny_qwen3_moe)),
    Kind("latent-attention", _perturbed(kinds.tiny_mla)),
    Kind("linear-attention", _perturbed(kinds.tiny_gdn)),
    Kind("images", _perturbed(vision.tiny_vlm)),
    Kind("gpt-oss-bf16", _perturbed(kinds.tiny_gpt_oss, mxfp4=False)),
    Kind("gpt-oss-marlin", _reseeded(kinds.tiny_gpt_oss), ("--moe-backend", "marlin"), _PACKED, needs_amx=True),
    Kind(
        "gpt-oss-triton",  # the only one that keeps weights where no exchange reaches: on a dataclass of its layers
        _reseeded(kinds.tiny_gpt_oss),
        ("--moe-backend", "triton"),
        {"beside": _HIDDEN, "host": _ON_HOST, "inplace": _HIDDEN},
        capability=(9, 0),
    ),
    Kind(
        "fp8-online",
        _perturbed(models.tiny_qwen3),
        ("--quantization", "fp8"),
        {"host": _ON_HOST, "inplace": _ONLINE},
        unloaded="quantises with an operator that the CPU build lacks",
    ),
    Kind(
        "fp8-static",
        _packed(quantised.fp8_static),
        refused=_PACKED,
        unloaded="requantises with an operator that the CPU build lacks",
    ),
    Kind("fp8-blocks", _packed(quantised.fp8_blocks), refused=_PACKED, needs_amx=True),
    Kind("awq", _packed(quantised.awq), refused=_PACKED),
    Kind(
        "drafts",
        _perturbed(kinds.tiny_mtp),
        ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
    ),
)


def kind_named(name: str) -> Kind:
    """The kind of this name."""
    return next(each for each in KINDS if each.name == name)


def checkpoints_of(kind: Kind, directory: Path) -> Mapping[str, Path]:
    """Writes the two checkpoints, and says where."""
    a, b = kind.make(directory)
    return {"a": a, "b": b}


def two(directory: Path) -> Mapping[str, Path]:
    """The checkpoints of a dense model."""
    return checkpoints_of(kind_named("dense"), directory)


def served() -> Iterator[tuple[Kind, str]]:
    """What has to work, by way."""
    return ((kind, way) for kind in KINDS for way in WAYS if way not in kind.refused)


def refused() -> Iterator[tuple[Kind, str]]:
    """What has to be refused at the start."""
    return ((kind, way) for kind in KINDS for way in WAYS if way in kind.refused)
