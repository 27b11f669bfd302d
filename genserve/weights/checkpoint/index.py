"""The checkpoint's own index: the tensors that a push must bring, read from the headers of its safetensors files.

No tensor is read. The live module is not the source, because it fuses, shards and repacks the checkpoint's tensors.

Owns the comparison of a manifest with the index, and finds the one difference that explains all unknown names, such as
what a wrapper puts into every name.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from genserve.tensors.inserted_names import BASE_LAYER, COMPILED, HALVES, MAGNITUDE, PARALLEL, PEFT_PREFIX, WRAPPED
from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec, bounded
from genserve.tensors.safetensors import CheckpointFileError, read_header
from genserve.weights.checkpoint.files import CheckpointFile, CheckpointFiles

MISSING: Final = "is missing"
"""The issue of a tensor that a push lacks, and which is not partial."""
_CASTABLE = frozenset({"F16", "BF16", "F32", "F64"})
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = "lm_head.weight"
# Enough for the mistakes of a trainer (a wrapper, a fused layout, too many buffers), while a hostile manifest costs
# little.
_MAX_TIMES_TENSORS = 4
_MAX_MORE_TENSORS = 1024
_REMEDY: Final = "pass rename=..."
_INSIDE: Final = (COMPILED, PARALLEL)
"""What stands before all names where the module that is wrapped is an attribute of this name."""
_PARTS: Final = (*WRAPPED, PARALLEL, BASE_LAYER)
"""What may be in the middle of names."""
_ADAPTER: Final = (*(half for pair in HALVES for half in pair), MAGNITUDE)
_FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")
"""How transformers names the experts of a layer, which checkpoints have one by one."""
_NUM_TRIED: Final = 8
"""Foreign names for which a counterpart is looked for: some may have none."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the checkpoint: safetensors' name of its type, its shape, its size in bytes, and the place of its
    first byte."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    path: Path = field(default=Path(), compare=False)
    position: int = field(default=0, compare=False)


@dataclass(frozen=True)
class CheckpointIndex:
    """Names, types and shapes of a checkpoint. `tied` names tensors that equal another one, and may be pushed or left
    out: {"lm_head.weight": "model.embed_tokens.weight"}. `unused` names tensors that the engine does not load, and that
    may be left out, too."""

    tensors: Mapping[str, CheckpointTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    @classmethod
    def read(cls, files: CheckpointFiles) -> "CheckpointIndex":
        """Reads the headers of the files, and the configuration beside them. Raises CheckpointFileError."""
        tensors: dict[str, CheckpointTensor] = {}
        for path, file in files.by_path.items():
            for name, tensor in _read_header(file):
                if name in tensors:
                    raise CheckpointFileError(f"{path}: {name!r} is in another file as well")
                tensors[name] = tensor
        if not tensors:
            raise CheckpointFileError(f"{files.directory}: the safetensors files hold no tensor")
        return cls(tensors, _tied(tensors, _read_config(files.directory)))

    @classmethod
    def read_file(cls, file: CheckpointFile) -> "CheckpointIndex":
        """Reads the header of one safetensors file. Raises CheckpointFileError."""
        return cls(dict(_read_header(file)))

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.length for tensor in self.tensors.values())

    @cached_property
    def max_tensors(self) -> int:
        """The largest number of tensors for which a manifest is read: far more than a valid one has, so that the error
        for an invalid one can name the wrong tensors."""
        return _MAX_TIMES_TENSORS * len(self.tensors) + _MAX_MORE_TENSORS

    def as_manifest(self) -> Manifest:
        """The tensors end to end in order of their names, as GetWeights returns them."""
        return Manifest.end_to_end((name, t.dtype, t.shape, t.length) for name, t in self.tensors.items())


def checkpoint_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> list[PushIssue]:
    """The differences between a manifest and a checkpoint: unknown tensors, then missing ones. `bounded` limits their
    number. Where one thing explains all unknown names, it is the only issue (`one_cause`).

    Floating-point types of 16 bits and more may differ, because values are cast on load. FP8 values may not: other
    tensors of the checkpoint scale them, and a cast would change their meaning.
    """
    cause = one_cause([spec.name for spec in manifest.tensors], checkpoint.tensors.keys() | checkpoint.tied.keys())
    if cause:
        return [PushIssue("", cause)]
    return bounded(_foreign_issues(manifest.tensors, checkpoint)) + bounded(_missing_issues(manifest, checkpoint))


def _missing_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> Iterator[PushIssue]:
    names = {spec.name for spec in manifest.tensors}
    if not manifest.partial:
        for name in sorted(checkpoint.tensors.keys() - names - checkpoint.tied.keys() - checkpoint.unused):
            yield PushIssue(name, MISSING)
    for name in sorted(names & checkpoint.tied.keys()):
        # vLLM would skip it, and the push would silently change nothing.
        if checkpoint.tied[name] not in names:
            yield PushIssue(name, f"is tied to {checkpoint.tied[name]!r}, push that tensor instead, or both")


def _foreign_issues(specs: tuple[TensorSpec, ...], checkpoint: CheckpointIndex) -> Iterator[PushIssue]:
    for spec in specs:
        expected = checkpoint.tensors.get(spec.name) or checkpoint.tensors.get(checkpoint.tied.get(spec.name, ""))
        if expected is None:
            yield PushIssue(spec.name, "is not in the checkpoint")
        elif spec.shape != expected.shape:
            yield PushIssue(spec.name, f"has shape {list(spec.shape)}, the checkpoint has {list(expected.shape)}")
        elif spec.dtype != expected.dtype and not {spec.dtype, expected.dtype} <= _CASTABLE:
            yield PushIssue(spec.name, f"is {spec.dtype}, which cannot be cast to the checkpoint's {expected.dtype}")


def _read_header(file: CheckpointFile) -> Iterator[tuple[str, CheckpointTensor]]:
    for spec in read_header(file.path, file.size_bytes, file.read):
        yield spec.name, CheckpointTensor(spec.dtype, spec.shape, spec.length, file.path, spec.offset)


def _read_config(directory: Path | None) -> Mapping[str, Any]:
    path = None if directory is None else directory / "config.json"
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointFileError(f"{path}: is not a JSON object")
    return config


def _tied(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> dict[str, str]:
    embedding = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if embedding is None:
        return {}
    text_config = config.get("text_config")
    said = config.get("tie_word_embeddings")
    if said is None and isinstance(text_config, dict):
        said = text_config.get("tie_word_embeddings")
    heads = {name for name in tensors if name.endswith(_HEAD)}
    # config.json omits defaults of the architecture; a checkpoint without a head must be tied then.
    tied = bool(said) if said is not None else not heads
    if not tied:
        return {}
    # Multimodal checkpoints prefix both: language_model.model.embed_tokens.weight, language_model.lm_head.weight.
    prefix = embedding.rpartition("model.embed_tokens.weight")[0]
    return dict.fromkeys(sorted(heads) or sorted({_HEAD, prefix + _HEAD}), embedding)


def one_cause(names: Collection[str], known: Set[str]) -> str:
    """Why names are not among the `known` ones, if it is one thing for all of them, and what to do about it: said of
    the manifest, in an error message. Otherwise ""."""
    foreign = [name for name in names if name not in known]
    if not foreign:
        return ""
    adapter = next((name for name in foreign if any(part in name for part in _ADAPTER)), None)
    if adapter is not None:
        remedy = "push it with push_lora, or merge it, and push the module"
        return f"has tensors of an adapter, such as {adapter[:256]!r}: {remedy}"
    fused = next((name for name in foreign if name.endswith(_FUSED)), None)
    if fused is not None and _has_one_by_one(known, fused.rpartition(".")[0]):
        return f"has the experts of a layer in one tensor, such as {fused[:256]!r}: push the module, which is converted"
    for rewrite, says in _rewritings(names, foreign, known):
        # Most of what is tried fails at the first name: a manifest of 100,000 costs little.
        if all(rewrite(name) in known for name in foreign):
            renamed = {name if name in known else rewrite(name) for name in names}
            return says if len(renamed) == len(names) else ""
    return ""


def _has_one_by_one(known: Set[str], experts: str) -> bool:
    """Whether the known names have these experts one by one, however the names begin: the remedy is the same."""
    owners = {f".{name[: name.index('.0.', at)]}" for name in known if (at := name.find(".experts.0.")) >= 0}
    return any(owner.endswith(f".{experts}") or f".{experts}".endswith(owner) for owner in owners)


def _rewritings(
    names: Collection[str], foreign: Sequence[str], known: Set[str]
) -> Iterator[tuple[Callable[[str], str], str]]:
    """What may make known names of foreign ones, and how to say it."""
    tried = foreign[:: -(-len(foreign) // _NUM_TRIED)]
    ends = sorted(name.split(".")[::-1] for name in known)
    for old, new in dict.fromkeys(pair for name in tried for pair in _beginnings(name, ends)):
        certain = f"names such as {foreign[0][:256]!r}"
        every = "every name" if all(name.startswith(old) for name in names) else certain
        if not old and any(name.startswith(new) for name in names):
            says = f"does not begin {certain} with {new!r}, as the checkpoint does: {_REMEDY}"
        elif not old:
            says = f"begins no name with {new!r}, as the checkpoint does: {_REMEDY}"
        elif new:
            says = f"begins {every} with {old!r} where the checkpoint has {new!r}: {_REMEDY}"
        else:
            inside = old.removesuffix(".")
            says = f"begins {every} with {old!r}: {_REMEDY}{f', or push model.{inside}' if inside in _INSIDE else ''}"
        yield partial(_begun, old, new), says
    parts = [part for part in _PARTS if any(f"{part}." in name for name in foreign)]
    if any(name.startswith(PEFT_PREFIX) for name in foreign):
        left_out = frozenset(parts)
        yield (
            lambda name: _without(left_out, name.removeprefix(PEFT_PREFIX)),
            f"has PEFT's names, such as {foreign[0][:256]!r}: push the module, or pass rename=...",
        )
    for chosen in [*([part] for part in parts), *([parts] if parts else [])]:
        shown = " and ".join(repr(f"{part}.") for part in chosen)
        yield partial(_without, frozenset(chosen)), f"has {shown} in names: {_REMEDY}, or push the module"


def _beginnings(name: str, ends: Sequence[list[str]]) -> Iterator[tuple[str, str]]:
    """How the name begins, and how a few known names begin that have the longest end in common with it. That is more
    than the last part, which any two modules may share, and beginnings have the same numbers, since another number is
    another layer. `ends`: the parts of the known names from the last to the first, sorted, so that names with the same
    end are neighbours."""
    parts = name.split(".")[::-1]
    place = bisect_left(ends, parts)
    near = ends[max(0, place - _NUM_TRIED) : place + _NUM_TRIED]
    common = {tuple(each): _num_common(parts, each) for each in near}
    most = max(common.values(), default=0)
    for each, num_common in common.items():
        if num_common == most > 1 and _numbers(parts[most:]) == _numbers(each[most:]):
            yield _beginning(parts[most:]), _beginning(each[most:])


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _numbers(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part.isdigit()]


def _beginning(parts: Sequence[str]) -> str:
    return "".join(f"{part}." for part in reversed(parts))


def _begun(old: str, new: str, name: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _without(left_out: frozenset[str], name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in left_out)
