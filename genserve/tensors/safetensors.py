"""Reads safetensors files and checkpoint directories without torch or numpy, memory-mapped; and writes a file.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, the header as JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the tensors end to end. A file is not trusted: every
number is checked against the file's size before anything is read by it.
"""

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genserve.tensors.dtypes import ITEM_BYTES, DtypeError, item_bytes

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the reference implementation has."""

_LENGTH_BYTES: Final = 8
_INDEX_SUFFIX: Final = ".safetensors.index.json"


class CheckpointFileError(ValueError):
    """A file is not what it claims to be; the message names it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, or one that was pulled; `data` is a view of the mapping or the memory and keeps it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def read_checkpoint(path: Path) -> list[StoredTensor]:
    """The tensors of a .safetensors file, or of a directory with one, several, or an index of them.

    Raises CheckpointFileError, or OSError when a file cannot be opened.
    """
    if path.is_dir():
        return _read_directory(path)
    return read_safetensors(path)


def read_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one file, in order of their offsets."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        if size_bytes < _LENGTH_BYTES:
            raise CheckpointFileError(f"{path}: {size_bytes} bytes are too few for a safetensors file")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    contents = memoryview(mapping)
    header_bytes = int.from_bytes(contents[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or data_start > size_bytes:
        raise CheckpointFileError(f"{path}: a header of {header_bytes} bytes cannot be; not a safetensors file?")
    data = contents[data_start:]
    header = _parse_json(path, contents[_LENGTH_BYTES:data_start].tobytes())
    header.pop("__metadata__", None)

    tensors = [_stored_tensor(path, name, entry, data) for name, entry in header.items()]
    tensors.sort(key=lambda each: each[0])
    expected = 0
    for (begin, end), tensor in tensors:
        if begin != expected:
            raise CheckpointFileError(f"{path}: {tensor.name}: begins at {begin}, the one before it ends at {expected}")
        expected = end
    if expected != len(data):
        raise CheckpointFileError(f"{path}: {len(data)} bytes of data, {expected} in the header")
    return [tensor for _, tensor in tensors]


def write_safetensors(path: Path, tensors: Iterable[StoredTensor]) -> None:
    """Writes one file, whole or not at all. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # So that all are aligned; those without a known size need not be.
    ordered, end = sorted(tensors, key=lambda each: (-ITEM_BYTES.get(each.dtype, 0), each.name)), 0
    for each in ordered:
        offsets = [end, end := end + len(each.data)]
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
            for each in ordered:
                file.write(each.data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


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
    weight_map = _parse_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointFileError(f"{path}: has no weight_map")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointFileError(f"{path}: {shard!r} is not the name of a .safetensors file beside it")
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
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointFileError(f"{path}: not a JSON object")
    return document


def _stored_tensor(path: Path, name: str, entry: Any, data: memoryview) -> tuple[tuple[int, int], StoredTensor]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise CheckpointFileError(f"{path}: {name}: needs dtype, shape and two data_offsets")
    try:
        size_bytes = math.prod(shape) * item_bytes(name, dtype)
    except DtypeError as error:
        raise CheckpointFileError(f"{path}: {error}") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointFileError(f"{path}: {name}: shape and data_offsets must be whole numbers")
    if not begin <= end <= len(data):
        raise CheckpointFileError(f"{path}: {name}: bytes {begin} to {end} lie outside the {len(data)} of the file")
    if end - begin != size_bytes:
        raise CheckpointFileError(f"{path}: {name}: {end - begin} bytes cannot hold {dtype} {shape}")
    return (begin, end), StoredTensor(name, dtype, tuple(shape), data[begin:end])
