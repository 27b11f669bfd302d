"""Reading safetensors files that are good, broken or hostile."""

import contextlib
import json
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from genserve.tensors.safetensors import MAX_HEADER_BYTES, CheckpointFileError, read_checkpoint, read_header


def write(path: Path, header: Any, data: bytes = b"", *, header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), data_offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def test_reads_what_the_reference_implementation_writes(tmp_path: Path) -> None:
    """Names, types, shapes and bytes are those that were saved, scalars and empty tensors included."""
    arrays = {
        "w": numpy.arange(6, dtype="float32").reshape(2, 3),
        "s": numpy.array(3, dtype="int64"),
        "e": numpy.zeros((0, 4), dtype="float16"),
    }
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "pt"})
    tensors = {tensor.name: tensor for tensor in read_checkpoint(tmp_path / "m.safetensors")}
    assert {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        "w": ("F32", (2, 3)),
        "s": ("I64", ()),
        "e": ("F16", (0, 4)),
    }
    assert all(tensors[name].data == array.tobytes() for name, array in arrays.items())


def test_reads_a_directory_by_its_index(tmp_path: Path) -> None:
    """The index says which shard has which tensor; what it does not name is not taken."""
    save_file({"a": numpy.ones(1), "unnamed": numpy.ones(1)}, tmp_path / "1.safetensors")
    save_file({"b": numpy.ones(1)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [tensor.name for tensor in read_checkpoint(tmp_path)] == ["a", "b"]


def test_reads_a_directory_without_an_index(tmp_path: Path) -> None:
    """Then every .safetensors file in it counts."""
    save_file({"a": numpy.ones(1)}, tmp_path / "model.safetensors")
    assert [tensor.name for tensor in read_checkpoint(tmp_path)] == ["a"]


@pytest.mark.parametrize("shard", ["../m.safetensors", "/m.safetensors", "x/m.safetensors", ".."])
def test_an_index_may_not_lead_out_of_its_directory(shard: str, tmp_path: Path) -> None:
    """Shards lie beside the index; paths are refused."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointFileError, match=re.escape(repr(shard))):
        read_checkpoint(tmp_path)


def test_an_index_is_not_read_to_its_end_however_long_it_is(tmp_path: Path) -> None:
    """A sparse file takes no space, and any amount of memory."""
    (tmp_path / "model.safetensors.index.json").touch()
    os.truncate(tmp_path / "model.safetensors.index.json", 1 << 40)
    with pytest.raises(CheckpointFileError, match="longer than 100000000"):  # JSON fails there as well
        read_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    """Half a checkpoint is not pushed."""
    save_file({"a": numpy.ones(1)}, tmp_path / "1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"z": "1.safetensors"}}))
    with pytest.raises(CheckpointFileError, match=r"\bz\b"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("header_bytes", [3, 100, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused(header_bytes: int, tmp_path: Path) -> None:
    """Beyond the file, beyond the limit, or cutting the JSON: nothing of that size is read."""
    path = write(tmp_path / "x", {"a": entry()}, bytes(4), header_bytes=header_bytes)
    with pytest.raises(CheckpointFileError):
        read_checkpoint(path)


def test_a_header_above_the_limit_is_not_read() -> None:
    """Though the file is large enough to have it."""
    lengths: list[int] = []

    def read(position: int, length: int) -> bytes:
        lengths.append(length)
        return struct.pack("<Q", MAX_HEADER_BYTES + 1)

    with pytest.raises(CheckpointFileError):
        read_header(Path("x"), MAX_HEADER_BYTES + 100, read)
    assert lengths == [8]


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": entry(), "b": entry()}, 4),
        ({"a": entry(), "b": entry(data_offsets=(2, 6))}, 6),
        ({"a": entry(), "b": entry(data_offsets=(5, 9))}, 9),
        ({"a": entry()}, 3),
        ({"a": entry()}, 5),
        ({"a": entry(data_offsets=(4, 0))}, 4),
        ({"a": entry(data_offsets=(-4, 0))}, 4),
        ({"a": entry(data_offsets=(0, 2**80))}, 4),
        ({"a": entry(data_offsets=(0, 4, 8))}, 8),
        ({"a": entry(data_offsets=(0.0, 4.0))}, 4),
        ({"a": entry(data_offsets=(False, 4))}, 4),
        ({"a": entry(shape=(2,))}, 4),
        ({"a": entry(shape=(-2, -2))}, 4),
        ({"a": entry(shape="4")}, 4),
        ({"a": entry(dtype="U9")}, 4),
        ({"a": entry(dtype=["U8"])}, 4),
        ({"a": [1]}, 4),
        ([1], 4),
        (b"{", 4),
        (b"\xff\xff", 4),
        (b'{"a": 1, "a": 1}', 4),
        (b"[" * 100_000, 4),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, data_bytes: int, tmp_path: Path) -> None:
    """Overlaps, gaps, ranges outside the file, sizes that do not fit, wrong types, names that occur twice."""
    with pytest.raises(CheckpointFileError):
        read_checkpoint(write(tmp_path / "x", header, bytes(data_bytes)))


@given(contents=st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_bytes_are_read_or_refused(contents: bytes, tmp_path: Path) -> None:
    """There is no other exception."""
    path = tmp_path / "x"
    path.write_bytes(contents)
    with contextlib.suppress(CheckpointFileError):
        read_checkpoint(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """As from open()."""
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (",".join(["9"] * 50_000), "out of range"),
        ("9" * 4000, "out of range"),
        ("9" * 5000, "JSON"),  # more digits than Python's parser takes
    ],
    ids=["many", "long", "too long"],
)
def test_a_shape_that_would_take_minutes_to_multiply_is_refused(tmp_path: Path, shape: str, says: str) -> None:
    """A product of large numbers holds Python's lock: nothing else would run meanwhile."""
    header = b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % shape.encode()
    began_s = time.thread_time()
    with pytest.raises(CheckpointFileError, match=says):  # not what it would hold: that is multiplied
        read_checkpoint(write(tmp_path / "m.safetensors", header, b"\0" * 4))
    assert time.thread_time() - began_s < 0.5
