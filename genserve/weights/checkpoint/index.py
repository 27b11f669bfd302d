"""The checkpoint's own index: the tensors that a push must bring, read from the headers of its safetensors files.

No tensor is read. The live module is not the source, because it fuses, shards and repacks the checkpoint's tensors.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec, bounded, too_many_tensors
from genserve.tensors.safetensors import CheckpointFileError, read_header
from genserve.weights.checkpoint.files import CheckpointFile, CheckpointFiles
from genserve.weights.checkpoint.rewriting import one_cause

_CASTABLE = frozenset({"F16", "BF16", "F32", "F64"})
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = "lm_head.weight"
# Enough for the mistakes of a trainer (a wrapper, a fused layout, too many buffers), while a hostile manifest costs
# little.
_MAX_TIMES_TENSORS = 4
_MAX_MORE_TENSORS = 1024


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

    @property
    def max_tensors(self) -> int:
        """The largest number of tensors for which a manifest is read: far more than a valid one has, so that the error
        for an invalid one can name the wrong tensors."""
        return _MAX_TIMES_TENSORS * len(self.tensors) + _MAX_MORE_TENSORS

    def as_manifest(self) -> Manifest:
        """The tensors end to end in order of their names, as GetWeights returns them."""
        return Manifest.end_to_end((name, t.dtype, t.shape, t.length) for name, t in self.tensors.items())


def checkpoint_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> list[PushIssue]:
    """The differences between a manifest and a checkpoint: unknown tensors, then missing ones. `bounded` limits their
    number. Where one thing explains all unknown names, it is the only issue (`rewriting.one_cause`).

    Floating-point types of 16 bits and more may differ, because values are cast on load. FP8 values may not: other
    tensors of the checkpoint scale them, and a cast would change their meaning.
    """
    too_many = too_many_tensors(len(manifest.tensors), checkpoint.max_tensors)
    if not too_many:
        cause = one_cause([spec.name for spec in manifest.tensors], checkpoint.tensors.keys() | checkpoint.tied.keys())
        if cause:
            return [PushIssue("", cause)]
        return bounded(_foreign_issues(manifest.tensors, checkpoint)) + bounded(_missing_issues(manifest, checkpoint))
    # Among this many tensors some are unknown or occur twice; the first ones show it.
    return too_many + bounded(_foreign_issues(manifest.tensors[: checkpoint.max_tensors + 1], checkpoint))


def _missing_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> Iterator[PushIssue]:
    names = {spec.name for spec in manifest.tensors}
    if not manifest.partial:
        for name in sorted(checkpoint.tensors.keys() - names - checkpoint.tied.keys() - checkpoint.unused):
            yield PushIssue(name, "is missing")
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
