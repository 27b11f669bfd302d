"""The checkpoint's own index: what a push has to bring, read from the headers of its safetensors files.

No tensor is read. The live module is not the source, for it fuses, shards and repacks what the checkpoint names.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genserve.weights.manifest import Manifest, PushIssue, TensorSpec, bounded, too_many_tensors

_MAX_HEADER_BYTES = 256 << 20
_CASTABLE = frozenset({"F16", "BF16", "F32", "F64"})
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = "lm_head.weight"


class CheckpointError(ValueError):
    """The checkpoint's index cannot be read; the message names the file."""


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
    def read(cls, directory: Path) -> "CheckpointIndex":
        """Reads the headers of the safetensors files in `directory`. Raises CheckpointError."""
        tensors: dict[str, CheckpointTensor] = {}
        for path in _files(directory):
            for name, tensor in _read_header(path):
                if name in tensors:
                    raise CheckpointError(f"{path}: {name!r} is in another file as well")
                tensors[name] = tensor
        if not tensors:
            raise CheckpointError(f"{directory}: the safetensors files hold no tensor")
        return cls(tensors, _tied(tensors, _read_config(directory)))

    @classmethod
    def read_file(cls, path: Path) -> "CheckpointIndex":
        """Reads the header of one safetensors file, by itself. Raises CheckpointError."""
        return cls(dict(_read_header(path)))

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.length for tensor in self.tensors.values())

    @property
    def max_tensors(self) -> int:
        """The most tensors that a manifest for this checkpoint can have."""
        return len(self.tensors.keys() | self.tied.keys())

    def as_manifest(self) -> Manifest:
        """The tensors end to end in order of their names: what GetWeights tells."""
        specs = []
        offset = 0
        for name, tensor in sorted(self.tensors.items()):
            specs.append(TensorSpec(name, tensor.dtype, tensor.shape, offset, tensor.length))
            offset += tensor.length
        return Manifest(tuple(specs), offset)


def checkpoint_issues(manifest: Manifest, checkpoint: CheckpointIndex) -> list[PushIssue]:
    """What keeps a manifest from fitting a checkpoint; see `bounded` for how many issues are told.

    The floating-point types of 16 bits and more may differ, as values are cast on load. FP8 values may not: they are
    scaled by other tensors of the checkpoint, and a cast would change what they mean.
    """
    too_many = too_many_tensors(len(manifest.tensors), checkpoint.max_tensors)
    if not too_many:
        return bounded(_issues(manifest, checkpoint))
    # Among this many some are unknown or occur twice; the first ones are enough to show it.
    return too_many + bounded(_foreign_issues(manifest.tensors[: checkpoint.max_tensors + 1], checkpoint))


def _issues(manifest: Manifest, checkpoint: CheckpointIndex) -> Iterator[PushIssue]:
    yield from _foreign_issues(manifest.tensors, checkpoint)
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


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index}: names a file outside of its directory")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: there is no safetensors file")
    return files


def _read_header(path: Path) -> Iterator[tuple[str, CheckpointTensor]]:
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            # Bounded before it is read: a file that is no safetensors file would ask for any amount.
            if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise CheckpointError(f"{path}: is no safetensors file, its header would be {length} bytes long")
            header = json.loads(file.read(length))
            size_bytes = path.stat().st_size
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = map(int, entry["data_offsets"])
                begin = 8 + length  # of the data
                if not 0 <= start <= end <= size_bytes - begin:
                    raise CheckpointError(f"{path}: {name!r} lies outside of the file, which may be truncated")
                shape = tuple(map(int, entry["shape"]))
                yield name, CheckpointTensor(str(entry["dtype"]), shape, end - start, path, begin + start)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header is malformed ({error!r})") from error


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return content


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
