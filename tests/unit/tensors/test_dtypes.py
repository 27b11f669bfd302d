"""The table of types, on each of the ways that a tensor takes."""

import json
import math
import re
import struct
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import numpy
import pytest
import safetensors
import torch

from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.sources import TensorSource, tensor_sources, to_torch
from genserve.errors import ManifestMismatchError
from genserve.memory.arena import Arena
from genserve.tensors.dtypes import FRAMEWORK_NAMES, ITEM_BYTES, SUB_BYTE, DtypeError
from genserve.tensors.manifest import Manifest, TensorSpec, completed, structural_issues
from genserve.tensors.safetensors import CheckpointFileError, StoredTensor, read_checkpoint, write_safetensors
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.push_admission import examine
from genserve.worker.arena_tensors import ArenaTensors
from genserve.worker.contract.calls import Prepare
from tests.support.refusals import refuses

SHAPE = (2, 4)


def stored(path: Path, dtype: str, size_bytes: int | None = None) -> Path:
    """A checkpoint of one tensor, `x`, and a flag before it, so that `x` is not aligned in the byte space."""
    data = bytes(range(ITEM_BYTES.get(dtype, 1) * math.prod(SHAPE) if size_bytes is None else size_bytes))
    header = {
        "a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": dtype, "shape": SHAPE, "data_offsets": [1, 1 + len(data)]},
    }
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\1" + data)
    return path


def test_the_table_is_that_of_safetensors(tmp_path: Path) -> None:
    """Whose error message lists what it knows: a newer release that knows more fails here."""
    with pytest.raises(safetensors.SafetensorError, match="expected one of") as raised:
        safetensors.safe_open(str(stored(tmp_path, "F31") / "model.safetensors"), "pt")  # type: ignore[no-untyped-call]
    known = re.findall("`(.*?)`", str(raised.value).partition("expected one of")[2])
    assert set(known) == ITEM_BYTES.keys() | SUB_BYTE
    assert FRAMEWORK_NAMES.keys() == ITEM_BYTES.keys()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_type_goes_all_the_way(tmp_path: Path, dtype: str) -> None:
    """From a trainer's tensor or file over a manifest and an arena to what a worker loads, bit by bit."""
    torch_dtype = getattr(torch, FRAMEWORK_NAMES[dtype])
    assert torch_dtype.itemsize == ITEM_BYTES[dtype]
    index = CheckpointIndex.read(CheckpointFiles.open(stored(tmp_path, dtype)))
    (file,) = (each for each in tensor_sources(tmp_path) if each.name == "x")
    tensor = to_torch(StoredTensor("x", dtype, SHAPE, file.read()))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype, SHAPE)
    (source,) = tensor_sources({"x": tensor})
    assert (source.dtype, source.size_bytes, bytes(source.read())) == (dtype, file.size_bytes, bytes(file.read()))

    pushed = ByteSpace([source]).manifest(partial=True)
    assert pushed.tensors == (TensorSpec("x", dtype, SHAPE, 0, source.size_bytes),)
    assert examine(pushed, "", index)[1] == []
    base = index.as_manifest()
    assert structural_issues(base) == []
    whole = completed(Manifest((base.tensors[0],), 1, partial=True), base, ())
    assert whole.tensors[1].offset == max(1, ITEM_BYTES[dtype])

    arena = Arena.allocate(whole.total_bytes)
    arena.write(whole.tensors[1].offset, source.read())
    places = [(t.name, t.dtype, t.shape, t.offset, t.length) for t in whole.tensors]
    request = Prepare("n", arena.path, arena.size_bytes, places, {})
    loaded = dict(ArenaTensors(request, arena.path, Event(), nullcontext))["x"]
    assert loaded.dtype == torch_dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
    arena.close()

    write_safetensors(tmp_path / "copy", [StoredTensor("x", dtype, SHAPE, source.read())])
    with safetensors.safe_open(str(tmp_path / "copy"), "pt") as copy:  # type: ignore[no-untyped-call]
        assert torch.equal(copy.get_tensor("x").view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [dtype for dtype, name in FRAMEWORK_NAMES.items() if hasattr(numpy, name)])
def test_numpy_has_the_same_names(dtype: str) -> None:
    """Those that it has: others are ml_dtypes'."""
    (source,) = tensor_sources({"x": numpy.zeros(SHAPE, FRAMEWORK_NAMES[dtype])})
    assert (source.dtype, source.size_bytes) == (dtype, 8 * ITEM_BYTES[dtype])


@pytest.mark.parametrize("dtype", [*sorted(SUB_BYTE), "F31"])
def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path: Path, dtype: str) -> None:
    """Pushed, or in the checkpoint that a partial push is completed from, or in a file of a trainer's."""
    index = CheckpointIndex.read(CheckpointFiles.open(stored(tmp_path, dtype, 4)))
    base = index.as_manifest()
    (issue,) = examine(base, "", index)[1]
    assert issue.tensor == "x"
    assert dtype in issue.description
    with refuses(ManifestMismatchError, field='header.manifest.tensors["x"]', says=dtype):
        completed(Manifest((base.tensors[0],), 1, partial=True), base, ())
    with pytest.raises(CheckpointFileError, match=f"x: .*{dtype}"):
        read_checkpoint(tmp_path)
    with pytest.raises(DtypeError, match=f"x: .*{dtype}"):
        ByteSpace([TensorSource("x", dtype, SHAPE, lambda: memoryview(b""))])
    with pytest.raises(DtypeError, match=f"x: .*{dtype}"):
        ArenaTensors(Prepare("n", "", 0, [("x", dtype, SHAPE, 0, 4)], {}), "", Event(), nullcontext)


def test_a_tensor_of_torch_without_a_name_in_safetensors_is_named() -> None:
    """Its type as well."""
    with pytest.raises(TypeError, match=r"x: .*float4_e2m1fn_x2"):
        tensor_sources({"x": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})


def test_what_is_pulled_can_be_saved_whatever_its_type(tmp_path: Path) -> None:
    """Its bytes are all there."""
    write_safetensors(tmp_path / "copy", [StoredTensor("x", "F4", SHAPE, memoryview(bytes(4)))])
    with safetensors.safe_open(str(tmp_path / "copy"), "pt") as copy:  # type: ignore[no-untyped-call]
        assert copy.get_tensor("x").dtype == torch.float4_e2m1fn_x2
