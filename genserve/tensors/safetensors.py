"""Reads safetensors files and checkpoint directories without torch or numpy, memory-mapped; and writes a file.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, the header as JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the tensors end to end. A file is not trusted: every
number is checked against the file's size before anything is read by it.
"""

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genserve.tensors.dtypes import ITEM_BYTES, DtypeError, item_bytes
from genserve.tensors.manifest import MAX_BYTES, MAX_RANK, TensorSpec

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the reference implementation."""

_LENGTH_BYTES: Final = 8
_INDEX_SUFFIX: Final = ".safetensors.index.json"


class CheckpointFileError(ValueError):
    """A file of a checkpoint is not valid or cannot be read. The message names it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, or one that was pulled. `data` is a view of the mapping or the memory and keeps it
    alive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def read_checkpoint(path: Path) -> list[StoredTensor]:
    """The tensors of a .safetensors file, or of a directory with one file, several files, or an index.

    Raises CheckpointFileError, or OSError if a file cannot be opened.
    """
    if path.is_dir():
        return _read_directory(path)
    return read_safetensors(path)


def read_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one file, in order of their offsets."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        # Nothing can be mapped from an empty file.
        contents = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b"")
    specs = read_header(path, size_bytes, lambda position, length: contents[position : position + length].tobytes())
    for spec in specs:
        try:
            item_bytes(spec.name, spec.dtype)
        except DtypeError as error:
            raise CheckpointFileError(f"{path}: {error}") from error
    return [StoredTensor(t.name, t.dtype, t.shape, contents[t.offset : t.offset + t.length]) for t in specs]


def read_header(path: Path, size_bytes: int, read: Callable[[int, int], bytes]) -> list[TensorSpec]:
    """The tensors of the file at `path`, in order of their places in it; `offset` counts from the start of the file.
    `read(position, length)` returns bytes of the file. Types are not checked, apart from the size of those that are
    known. Raises CheckpointFileError, and whatever `read` does."""
    header_bytes = int.from_bytes(read(0, _LENGTH_BYTES), "little") if size_bytes >= _LENGTH_BYTES else 0
    data_start = _LENGTH_BYTES + header_bytes
    # Bounded before it is read: a file of another format could ask for any amount.
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or data_start > size_bytes:
        raise CheckpointFileError(f"{path}: is not a safetensors file: its header would be {header_bytes} bytes long")
    header = _parse_json(path, read(_LENGTH_BYTES, header_bytes))
    header.pop("__metadata__", None)
    specs = [_tensor_spec(path, name, entry, data_start, size_bytes) for name, entry in header.items()]
    specs.sort(key=lambda spec: (spec.offset, spec.length))
    end = data_start
    for spec in specs:
        if spec.offset != end:
            begin = spec.offset - data_start
            raise CheckpointFileError(
                f"{path}: {spec.name}: begins at {begin}, the one before it ends at {end - data_start}"
            )
        end += spec.length
    if end != size_bytes:
        raise CheckpointFileError(f"{path}: {size_bytes - data_start} bytes of data, {end - data_start} in the header")
    return specs


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of the file that has it, beside the index, as the index of a checkpoint says. Raises
    CheckpointFileError, or OSError if the index cannot be read."""
    with index.open("rb") as file:
        data = file.read(MAX_HEADER_BYTES + 1)
    if len(data) > MAX_HEADER_BYTES:
        raise CheckpointFileError(f"{index}: is longer than {MAX_HEADER_BYTES} bytes")
    weight_map = _parse_json(index, data).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointFileError(f"{index}: has no weight_map")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointFileError(f"{index}: {shard!r} is not the name of a .safetensors file beside it")
    return weight_map


def write_safetensors(path: Path, tensors: Iterable[StoredTensor]) -> None:
    """Writes one file, completely or not at all. Raises OSError."""
    # Larger elements first, so that all are aligned; tensors without a known size need no alignment.
    ordered = sorted(tensors, key=lambda each: (-ITEM_BYTES.get(each.dtype, 0), each.name))
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(encoded_header((each.name, each.dtype, each.shape, len(each.data)) for each in ordered))
            for each in ordered:
                file.write(each.data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def encoded_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The header length and the header of a file whose tensors have these names, types, shapes and lengths in bytes,
    and lie end to end. The data that follow are aligned to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, length in tensors:
        offsets = [end, end := end + length]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def _read_directory(path: Path) -> list[StoredTensor]:
    indices = sorted(path.glob(f"*{_INDEX_SUFFIX}"))
    if len(indices) > 1:
        raise CheckpointFileError(f"{path}: has {len(indices)} indices; give one file")
    if indices:
        return list(_read_index(indices[0]))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"{path}: has no .safetensors file")
    return [tensor for file in files for tensor in read_safetensors(file)]


def _read_index(path: Path) -> Iterator[StoredTensor]:
    weight_map = read_weight_map(path)
    for shard in sorted(set(weight_map.values())):
        tensors = {tensor.name: tensor for tensor in read_safetensors(path.parent / shard)}
        for name in (name for name, file in weight_map.items() if file == shard):
            if name not in tensors:
                raise CheckpointFileError(f"{path}: {shard} has no {name}")
            yield tensors[name]


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise CheckpointFileError(f"{path}: a name occurs twice")
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=unique)
    except CheckpointFileError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a ValueError too
        raise CheckpointFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointFileError(f"{path}: not a JSON object")
    return document


def _tensor_spec(path: Path, name: str, entry: Any, data_start: int, size_bytes: int) -> TensorSpec:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise CheckpointFileError(f"{path}: {name}: needs dtype, shape and two data_offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointFileError(f"{path}: {name}: shape and data_offsets must be whole numbers")
    if len(shape) > MAX_RANK or any(size >= MAX_BYTES for size in shape):
        # Before they are multiplied: a product of a million numbers takes minutes, and holds the global lock.
        raise CheckpointFileError(f"{path}: {name}: the shape is out of range")
    data_bytes = size_bytes - data_start
    if not begin <= end <= data_bytes:
        raise CheckpointFileError(
            f"{path}: {name}: bytes {begin} to {end} lie outside the {data_bytes} of the file, which may be truncated"
        )
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointFileError(f"{path}: {name}: {end - begin} bytes cannot hold {dtype} {shape}")
    return TensorSpec(name, dtype, tuple(shape), data_start + begin, end - begin)
