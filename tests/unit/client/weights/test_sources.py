"""Weights of any kind become named bytes."""

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from genserve.client import AsyncClient
from genserve.client.weights.sources import check_finite, tensor_sources, to_torch
from genserve.tensors.dtypes import FRAMEWORK_NAMES
from genserve.tensors.safetensors import StoredTensor
from tests.support.scripted_services import ScriptedDaemon
from tests.support.wrappers import only_rank

TYPES = [name for name in FRAMEWORK_NAMES.values() if "float" in name or "complex" in name]
FINITE = [0.0, -0.0, 1.0, -1.5, 1e-7]


def contents(weights: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {each.name: (each.dtype, each.shape, bytes(each.read())) for each in tensor_sources(weights)}


class TiedModel(torch.nn.Module):
    """A head that is the embedding, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.lm_head = torch.nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def test_a_module_sends_tied_weights_once() -> None:
    """As in checkpoints, the first name is kept: lm_head.weight is left out."""
    assert list(contents(TiedModel())) == ["embed_tokens.weight", "norm.weight", "norm.bias"]


def test_a_tied_head_alone_is_sent() -> None:
    """Only a second name for the same bytes is left out."""
    assert list(contents({"lm_head.weight": TiedModel().lm_head.weight})) == ["lm_head.weight"]


def test_views_that_share_memory_but_are_not_the_same_are_all_sent() -> None:
    """Halves of a fused tensor, and a transpose, are tensors of their own."""
    fused = torch.arange(4.0).reshape(2, 2)
    tensors = contents({"q": fused[:1], "k": fused[1:], "t": fused.T, "all": fused})
    assert list(tensors) == ["q", "k", "t", "all"]
    assert numpy.frombuffer(tensors["t"][2], "<f4").tolist() == [0, 2, 1, 3]


def test_bfloat16_needs_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy has no bfloat16; the bytes are read from memory."""
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert contents({"w": tensor}) == {"w": ("BF16", (2,), b"\x80\x3f\x00\xc0")}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "F64"), (torch.float32, "F32"), (torch.float16, "F16"), (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"), (torch.int64, "I64"), (torch.int32, "I32"), (torch.int16, "I16"),
        (torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.uint16, "U16"), (torch.complex64, "C64"),
    ],
)  # fmt: skip
def test_torch_types_have_the_names_of_safetensors(dtype: torch.dtype, name: str) -> None:
    """And the sizes."""
    (source,) = tensor_sources({"w": torch.zeros(3, 2).to(dtype)})
    assert source.dtype == name
    assert source.size_bytes == len(source.read()) == 6 * dtype.itemsize


def test_scalars_and_empty_tensors() -> None:
    """A scalar has an empty shape, an empty tensor no bytes; several empty ones are not taken for tied."""
    weights = {"s": torch.tensor(1.0), "e": torch.zeros(0, 3), "f": torch.zeros(0, 3)}
    assert contents(weights)["s"] == ("F32", (), b"\x00\x00\x80\x3f")
    assert contents(weights)["e"] == ("F32", (0, 3), b"")
    assert "f" in contents(weights)
    assert contents({"one": torch.tensor(5, dtype=torch.int8)})["one"] == ("I8", (), b"\x05")


def test_a_read_tensor_outlives_its_source() -> None:
    """The view keeps the memory, also of a copy that was made for it."""
    (source,) = tensor_sources({"w": torch.arange(1000.0).reshape(10, 100).T})
    data = source.read()
    del source
    assert data[:4] == b"\x00\x00\x00\x00"
    assert len(data) == 4000


def test_numpy_arrays_are_made_contiguous_and_little_endian() -> None:
    """Strides and byte order are not the daemon's concern."""
    array = numpy.arange(4, dtype=">f4").reshape(2, 2)
    assert contents({"w": array.T})["w"] == ("F32", (2, 2), numpy.array([0, 2, 1, 3], "<f4").tobytes())
    assert contents({"s": numpy.array(1, "int8")})["s"] == ("I8", (), b"\x01")


def test_only_what_lies_otherwise_than_it_is_sent_is_copied(tmp_path: Path) -> None:
    """The rest is read where it lies, which takes no time and no thread."""
    whole, complexes = torch.zeros(2, 3), torch.zeros(2, dtype=torch.complex64)
    lies = {"torch": whole, "numpy": numpy.zeros((2, 3)), "stored": StoredTensor("s", "U8", (2,), memoryview(b"ab"))}
    assert {each.name: each.copies for each in tensor_sources(lies)} == dict.fromkeys(lies, False)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    assert [each.copies for each in tensor_sources(tmp_path)] == [False]
    differs = {
        "strided": whole.T, "conjugated": complexes.conj(), "negated": complexes.conj().imag,
        "numpy": numpy.zeros((2, 3)).T, "big": numpy.zeros(2, ">f4"),
    }  # fmt: skip
    assert {each.name: each.copies for each in tensor_sources(differs)} == dict.fromkeys(differs, True)


def test_an_adapter_keeps_what_a_checkpoint_would_leave_out() -> None:
    """Each of its tensors is looked for by name."""
    one = torch.zeros(2)
    assert [each.name for each in tensor_sources({"a": one, "b": one}, tied_once=False)] == ["a", "b"]


def test_what_has_no_bytes_or_no_name_is_refused_by_name() -> None:
    """The message says which tensor."""
    for tensor, reason in (
        (torch.zeros(1, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(1, dtype=torch.complex128), "complex128"),
        (numpy.array(["x"]), "str32"),
        ([1.0], "list"),
    ):
        with pytest.raises(TypeError, match=rf"^w: .*{reason}"):
            tensor_sources({"w": tensor})
    with pytest.raises(TypeError, match="int"):
        tensor_sources(3)


def test_a_sharded_tensor_is_refused_with_what_to_use_instead() -> None:
    """FSDP's first version gives such ones where it has no device mesh. They answer hardly any question."""
    with only_rank():
        sharded = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 2, 2)
        with pytest.raises(TypeError, match=r"^w: a ShardedTensor; give FSDP a device_mesh"):
            tensor_sources({"w": sharded})


def test_the_same_bytes_of_another_type_are_another_tensor() -> None:
    """As are those of an adapter whose names are all meant."""
    floats = torch.arange(4.0)
    views = {"f": floats, "i": floats.view(torch.int32), "g": floats.detach(), "h": floats.view(2, 2)}
    assert list(contents(views)) == ["f", "i", "h"]
    meta = {"a": torch.zeros(2).to_sparse(), "b": torch.zeros(2).to_sparse()}
    with pytest.raises(TypeError, match=r"^a: .*sparse"):
        tensor_sources(meta)


def test_pulled_bytes_are_tensors_over_the_same_memory_where_it_is_aligned() -> None:
    """Elsewhere of a copy; and one without bytes has its shape."""
    memory = bytearray(numpy.arange(4, dtype="<f4").tobytes() * 2)
    aligned = StoredTensor("a", "F32", (2, 2), memoryview(memory)[:16])
    tensor = to_torch(aligned)
    assert (tensor.shape, tensor.dtype, tensor.tolist()) == ((2, 2), torch.float32, [[0.0, 1.0], [2.0, 3.0]])
    memory[0:4] = numpy.float32(7).tobytes()
    assert tensor.tolist() == [[7.0, 1.0], [2.0, 3.0]]
    shifted = to_torch(StoredTensor("s", "F32", (1,), memoryview(bytearray(b"-" + memory[4:8] + b"-"))[1:5]))
    assert (shifted.shape, shifted.tolist()) == ((1,), [1.0])
    empty = to_torch(StoredTensor("e", "BF16", (0, 3), memoryview(b"")))
    assert (empty.shape, empty.dtype) == ((0, 3), torch.bfloat16)
    with pytest.raises(ValueError, match="x"):
        to_torch(StoredTensor("x", "F4", (2,), memoryview(b"a")))


def test_a_source_of_a_checkpoint_has_the_bytes_of_its_file(tmp_path: Path) -> None:
    """By a file's path, as text or not, and by that of its directory."""
    save_file({"w": torch.arange(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        assert contents(path) == {"w": ("I8", (3,), b"\x00\x01\x02")}


def refused(weights: Any) -> str:
    """The name of the tensor that is refused, "" if none is."""
    try:
        check_finite(tensor_sources(weights))
    except ValueError as error:
        return str(error).partition(":")[0]
    return ""


def forms(tensor: torch.Tensor, directory: Path) -> list[Any]:
    """The tensor as torch's, and as bytes of a file."""
    path = directory / "model.safetensors"
    save_file({"w": tensor}, path)
    return [{"w": tensor}, path]


@pytest.mark.parametrize("dtype", TYPES)
def test_values_of_every_type_are_told_from_what_is_none(dtype: str, tmp_path: Path) -> None:
    """At the beginning, in the middle and at the end; the largest numbers of a type are finite."""
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    positive = "e8m0" in dtype
    values = [1.0, 2.0, largest] if positive else [*FINITE, largest, -largest]
    good = torch.tensor(values, dtype=torch.float64).to(kind)
    assert [refused(form) for form in forms(good, tmp_path)] == ["", ""]
    for wrong in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 2, len(values) - 1):
            bad = torch.tensor([*values[:place], wrong, *values[place + 1 :]], dtype=torch.float64).to(kind)
            if bool(torch.isfinite(bad.to(torch.complex64 if kind.is_complex else torch.float64)).all()):
                continue  # the type has no such value: it became the largest one
            assert [refused(form) for form in forms(bad, tmp_path)] == ["w", "w"], (wrong, place)


def test_what_has_no_such_values_is_taken() -> None:
    """Integers, and tensors without elements."""
    whole = {"a": torch.full((3,), 255, dtype=torch.uint8), "b": torch.tensor([-1]), "c": torch.empty(0, 2)}
    assert refused(whole) == ""
    assert refused({name: tensor.numpy() for name, tensor in whole.items()}) == ""


def test_arrays_of_numpy_are_looked_at_whatever_their_order() -> None:
    """Big-endian, strided, and of half the size."""
    bad = numpy.array([[1, 2], [3, numpy.inf]])
    assert refused({"a": numpy.zeros(2), "b": bad.T.astype(">f4")}) == "b"
    assert refused({"a": bad.astype("float16")}) == "a"
    assert refused({"a": bad[0].astype("float16")}) == ""


async def test_a_push_with_nan_is_refused_and_sends_nothing(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The error names the first tensor. Without the option it is sent like any other value."""
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")]), "c": torch.tensor([float("inf")])}
    with pytest.raises(ValueError, match=r"^b: "):
        await client.push_weights(weights, version=1, finite=True)
    assert daemon.streams == []
    config = {"r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    with pytest.raises(ValueError, match=r"^b: "):
        await client.push_lora("policy", weights, config, finite=True)
    assert daemon.streams == []
    assert (await client.push_weights(weights, version=1)).push.state == "applied"
    assert (await client.push_weights({"a": weights["a"]}, version=2, finite=True)).push.state == "applied"
