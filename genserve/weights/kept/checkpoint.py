"""Writes a version as a checkpoint that vLLM and transformers load, and reads it back. Blocks: for a thread, beside
which a few more hash where there are many cores."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.dtypes import ITEM_BYTES
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.tensors.safetensors import encoded_header
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointSpace
from genserve.weights.kept.directory import sync, write_through

View = Callable[[int, int], memoryview]
"""The bytes [start, end) of a byte space. Raises whatever is to end the writing, or the reading."""

SHARD_BYTES: Final = 4 << 30
"""Of tensors in a file, unless a single one is larger."""
_SYNCED_BYTES: Final = 256 << 20
"""How much of a file may wait to be written: the kernel would otherwise hold up other writers in the end."""
_CORES_PER_THREAD: Final = 8
_MAX_THREADS: Final = 4
_COPIED: Final = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
"""The suffixes of files with a configuration, a tokenizer, or the code of a model."""
_INDEX: Final = ".index.json"


def num_threads() -> int:
    """How many hash at once: one takes a second for a GB."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))


def write_checkpoint(target: Path, manifest: Manifest, view: View, beside: Path, shard_bytes: int = SHARD_BYTES) -> str:
    """Writes the tensors into the empty directory `target`, and copies the files of `beside` that are not weights.
    Returns the content digest of what it has written, all of which is on disk. Raises OSError, and as `view`."""
    for source in _small_files(beside):
        copy = target / source.relative_to(beside)
        copy.parent.mkdir(exist_ok=True)
        write_through(copy, source.read_bytes())
    # Larger elements first, so that all are aligned.
    ordered = sorted(manifest.tensors, key=lambda each: (-ITEM_BYTES.get(each.dtype, 0), each.name))
    shards = list(_shards(ordered, shard_bytes))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with ThreadPoolExecutor(num_threads()) as threads:
        written = list(threads.map(lambda name, shard: _write_shard(target / name, shard, view), names, shards))
    if len(shards) > 1:
        total_bytes = sum(each.length for each in manifest.tensors)
        weight_map = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_through(target / f"model.safetensors{_INDEX}", json.dumps(index, indent=2).encode())
    for directory in (target, *(each for each in target.iterdir() if each.is_dir())):
        sync(directory)
    return content_digest(each for digests in written for each in digests)


def open_kept(directory: Path) -> CheckpointSpace:
    """The tensors of a checkpoint. Raises CheckpointFileError."""
    files = CheckpointFiles.open(directory)
    return CheckpointSpace(CheckpointIndex.read(files), files)


def digest_of(space: CheckpointSpace, check: Callable[[], None] = lambda: None) -> str:
    """Reads every byte. Raises CheckpointFileError, and whatever `check` raises, which is called now and then."""

    def view(start: int, end: int) -> memoryview:
        check()
        data = memoryview(bytearray(end - start))
        space.read_into(start, data)
        return data

    tensors = space.manifest.tensors
    with ThreadPoolExecutor(num_threads()) as threads:
        digests = threads.map(lambda tensor: tensor_digest(tensor, view), tensors)
        return content_digest(zip(tensors, digests, strict=True))


def _small_files(directory: Path) -> Iterator[Path]:
    """Those of the directory, and of directories in it unless they are checkpoints themselves."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and not any(path.glob("*.safetensors")):
            yield from (each for each in sorted(path.iterdir()) if _is_copied(each))
        elif _is_copied(path):
            yield path


def _is_copied(path: Path) -> bool:
    return path.suffix in _COPIED and not path.name.endswith(_INDEX) and path.is_file()


def _shards(tensors: Sequence[TensorSpec], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    num_bytes = 0
    for tensor in tensors:
        if shard and num_bytes + tensor.length > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += tensor.length
    yield shard


def _write_shard(path: Path, tensors: Sequence[TensorSpec], view: View) -> list[tuple[TensorSpec, str]]:
    """Writes one file, and returns the digest of each tensor as it was written."""
    with path.open("xb", buffering=0) as file:
        fd, num_waiting = file.fileno(), 0

        def written(start: int, end: int) -> memoryview:
            nonlocal num_waiting
            data = view(start, end)
            _write_all(fd, data)
            num_waiting += len(data)
            if num_waiting >= _SYNCED_BYTES:
                os.fdatasync(fd)
                num_waiting = 0
            return data

        _write_all(fd, memoryview(encoded_header((each.name, each.dtype, each.shape, each.length) for each in tensors)))
        digests = [(each, tensor_digest(each, written)) for each in tensors]
        os.fsync(fd)
        # What is read back is to come from the disk.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
