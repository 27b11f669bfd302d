"""Memory that runs out, and what is left then."""

import gc

import pytest
import torch

from tests.support.fake_cuda import runtime
from tests.support.fake_cuda.workers import LARGE, Loaded

pytestmark = pytest.mark.usefixtures("engine")

_MOST_ALLOCATIONS = 200


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The large model."""
    return Loaded.of(LARGE, tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize("way", ["beside", "host", "inplace"])
def test_no_allocation_of_a_preparation_may_be_missing(loaded: Loaded, way: str) -> None:
    """Nothing is reserved, as after a sleep beside a trainer: each allocation asks the driver. Whichever fails, the
    live version stays, and the next push works."""
    updated = loaded.update(way)
    assert updated.push("a") == []
    for num_succeeding in range(_MOST_ALLOCATIONS):
        updated.update.release_memory()
        gc.collect()
        torch.cuda.empty_cache()
        with runtime.failing_after(num_succeeding):
            try:
                updated.prepare("b")
            except torch.OutOfMemoryError:
                updated.update.discard()
                assert loaded.differing("a") == []
                continue
        break
    assert 0 < num_succeeding < _MOST_ALLOCATIONS
    updated.update.discard()
    assert updated.push("b") == []
    assert updated.push("a") == []


def test_a_driver_that_refuses_to_pin_makes_pushes_slower_alone(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not wrong."""
    gc.collect()
    torch._C._host_emptyCache()
    monkeypatch.setenv("FAKE_CUDA_PINNED_BYTES", "1")
    updated = loaded.update("beside")
    assert updated.chosen.device.pinned_bytes == 0
    assert updated.push("b") == []
    assert updated.push("a") == []
