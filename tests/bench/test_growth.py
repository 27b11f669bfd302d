"""What the growth of a cost is, and the model that it is measured with."""

import json
from pathlib import Path

import pytest

from bench.growth import UNUSED, checkpoint_with_unused, exponent

SIZES = [100, 200, 400, 800]


@pytest.mark.parametrize(("power", "expected"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_the_exponent_is_the_power_of_the_size(power: int, expected: float) -> None:
    """That of a cost without any noise."""
    values = [(size / 100) ** power for size in SIZES]
    assert exponent(SIZES, values, noise=0.01) == pytest.approx(expected)


def test_what_is_noise_does_not_grow() -> None:
    """A cost that is smaller than the noise is none; a small one at first is taken for noise, not for nothing."""
    assert exponent(SIZES, [0.0, 0.0, 0.02, 0.05], noise=0.05) is None
    assert exponent(SIZES, [0.0, 0.1, 0.2, 0.4], noise=0.05) == pytest.approx(1.0)


def test_the_checkpoint_has_tensors_that_are_not_used(tmp_path: Path) -> None:
    """In a file of their own, which the index names as well as the model's."""
    directory = checkpoint_with_unused(tmp_path / "checkpoint", 3)
    names = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in names.items() if file == "unused.safetensors"} == {f"{UNUSED}.{i}" for i in range(3)}
    assert "model.norm.weight" in names
