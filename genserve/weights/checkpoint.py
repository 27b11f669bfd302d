"""The checkpoint's own index: what a push has to bring, read from the headers of its safetensors files.

No tensor is read. The live module is not the source, for it fuses, shards and repacks what the checkpoint names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec, bounded, too_many_tensors
from genserve.tensors.safetensors import CheckpointFileError, read_header
from genserve.weights.checkpoint_files import CheckpointError, CheckpointFile, CheckpointFiles, read_json

_CASTABLE = frozenset({"F16", "BF16", "F32", "F64"})
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = "lm_head.weight"
# A trainer with a wrapper, a fused layout or buffers too many is told which; a hostile manifest costs little yet.
_MAX_TIMES_TENSORS = 4
_MAX_MORE_TENSORS = 1024


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the checkpoint: safetensors' name of its type, its shape, its size in bytes, and where its
    first byte lies."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    path: Path = field(default=Path(), compare=False)
    position: int = field(default=0, compare=False)


@dataclass(frozen=True)
class CheckpointIndex:
    """Names, types and shapes of a checkpoint. `tied` names tensors that may be pushed or left out as they are the same
    as another: {"lm_head.weight": "model.embed_tokens.weight"}."""

    tensors: Mapping[str, CheckpointTensor]
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, files: CheckpointFiles) -> "CheckpointIndex":
        """Reads the headers of the files, and the configuration beside them. Raises CheckpointError."""
        tensors: dict[str, CheckpointTensor] = {}
        for path, file in files.by_path.items():
            for name, tensor in _read_header(file):
                if name in tensors:
                    raise CheckpointError(f"{path}: {name!r} is in another file as well")
                tensors[name] = tensor
        if not tensors:
            raise CheckpointError(f"{files.directory}: the safetensors files hold no tensor")
        return cls(tensors, _tied(tensors, _read_config(files.directory)))

    @classmethod
    def read_file(cls, file: CheckpointFile) -> "CheckpointIndex":
        """Reads the header of one safetensors file, by itself. Raises CheckpointError."""
        return cls(dict(_read_header(file)))

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.length for tensor in self.tensors.values())

    @property
    def max_tensors(self) -> int:
        """The most tensors of a manifest that is read: far more than a good one has, so that it can be said which ones
        of a mistaken one are wrong."""
        return _MAX_TIMES_TENSORS * len(self.tensors) + _MAX_MORE_TENSORS

    def as_manifest(self) -> Manifest:
        """The tensors end to end in order of their names: what GetWeights tells."""
        return Manifest.end_to_end((name, t.dtype, t.shape, t.length) for name, t in self.tensors.items())


def checkpoint_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> list[PushIssue]:
    """What keeps a manifest from fitting a checkpoint: tensors that do not belong there, then those that are missing;
    see `bounded` for how many of either are told.

    The floating-point types of 16 bits and more may differ, as values are cast on load. FP8 values may not: they are
    scaled by other tensors of the checkpoint, and a cast would change what they mean.
    """
    too_many = too_many_tensors(len(manifest.tensors), checkpoint.max_tensors)
    if not too_many:
        return bounded(_foreign_issues(manifest.tensors, checkpoint)) + bounded(_missing_issues(manifest, checkpoint))
    # Among this many some are unknown or occur twice; the first ones are enough to show it.
    return too_many + bounded(_foreign_issues(manifest.tensors[: checkpoint.max_tensors + 1], checkpoint))


def _missing_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> Iterator[PushIssue]:
    names = {spec.name for spec in manifest.tensors}
    if not manifest.partial:
        for name in sorted(checkpoint.tensors.keys() - names - checkpoint.tied.keys()):
            yield PushIssue(name, "is missing")
    for name in sorted(names & checkpoint.tied.keys()):
        # vLLM would skip it, and the push would change nothing without a word.
        if checkpoint.tied[name] not in names:
            yield PushIssue(name, f"is tied to {checkpoint.tied[name]!r}, which has to be pushed instead or as well")


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
    try:
        specs = read_header(file.path, file.size_bytes, file.read)
    except CheckpointFileError as error:
        raise CheckpointError(str(error)) from error
    for spec in specs:
        yield spec.name, CheckpointTensor(spec.dtype, spec.shape, spec.length, file.path, spec.offset)


def _read_config(directory: Path | None) -> Mapping[str, Any]:
    path = None if directory is None else directory / "config.json"
    return read_json(path) if path is not None and path.is_file() else {}


def _tied(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> dict[str, str]:
    embedding = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if embedding is None:
        return {}
    text_config = config.get("text_config")
    said = config.get("tie_word_embeddings")
    if said is None and isinstance(text_config, dict):
        said = text_config.get("tie_word_embeddings")
    heads = {name for name in tensors if name.endswith(_HEAD)}
    # config.json leaves out what is the default of its architecture; a checkpoint without a head must be tied then.
    tied = bool(said) if said is not None else not heads
    if not tied:
        return {}
    # Multimodal checkpoints prefix both: language_model.model.embed_tokens.weight, language_model.lm_head.weight.
    prefix = embedding.rpartition("model.embed_tokens.weight")[0]
    return dict.fromkeys(sorted(heads) or sorted({_HEAD, prefix + _HEAD}), embedding)
