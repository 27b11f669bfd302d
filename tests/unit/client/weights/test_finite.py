"""A version with NaN or infinity is refused before anything of it is sent, if the trainer asks for it."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.client.weights.finite import check_finite
from genserve.client.weights.sources import tensor_sources
from genserve.tensors.dtypes import FRAMEWORK_NAMES
from tests.unit.client.scripted_daemon import ScriptedDaemon

TYPES = [name for name in FRAMEWORK_NAMES.values() if "float" in name or "complex" in name]
FINITE = [0.0, -0.0, 1.0, -1.5, 1e-7]


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
