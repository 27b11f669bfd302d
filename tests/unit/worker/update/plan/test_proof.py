"""A plan that would not do what the loader does is found before it loads a version."""

import itertools
from collections.abc import Callable

import pytest
import torch

from genserve.worker.update.plan.loading import fingerprint
from tests.unit.worker.update.plan.loaders import (
    Loader,
    Model,
    Pushed,
    Tensors,
    copies,
    elsewhere,
    loaded_anew,
    version,
)


def counting() -> Loader:
    """Writes a number that depends on how often it was called, which no attribute shows."""
    numbers = itertools.count()

    def load(model: Model, tensors: Tensors) -> set[str]:
        loaded = copies(model, tensors)
        model.total.data.fill_(next(numbers))
        return loaded

    return load


def settling() -> Loader:
    """Has something to do once that needs no second time."""
    done: list[bool] = []

    def load(model: Model, tensors: Tensors) -> set[str]:
        loaded = copies(model, tensors)
        if not done:
            model.total.data.fill_(1)
            done.append(True)
        return loaded

    return load


def half_elsewhere() -> Loader:
    """Copies half of a parameter in another thread."""
    return elsewhere("bias.second")


def saying() -> Loader:
    """Says every time that it has loaded something else."""
    numbers = itertools.count()

    def load(model: Model, tensors: Tensors) -> set[str]:
        return copies(model, tensors) | {f"part {next(numbers)}"}

    return load


def noting() -> Loader:
    """Leaves another note every time."""
    numbers = itertools.count(1)

    def load(model: Model, tensors: Tensors) -> set[str]:
        model.notes["number"] = next(numbers)
        return copies(model, tensors)

    return load


@pytest.mark.parametrize("make", [counting, settling, half_elsewhere, saying, noting])
def test_a_loader_that_does_not_always_do_what_is_seen_loads_every_version(make: Callable[[], Loader]) -> None:
    """And every version is what that loader makes of it."""
    pushed, loader = Pushed(make()), make()
    for seed in (0, 1, 2, 3):
        assert pushed.push(version(seed)) == Pushed(loader).push(version(seed))
        assert pushed.loading.plan is None
    assert pushed.loading.refusal == "it does not always do what was seen"
    assert pushed.num_loads == 4


def test_a_parameter_that_gets_other_memory_later_is_seen() -> None:
    """A plan writes to the memory that parameters have before a load."""
    calls: list[None] = []

    def load(model: Model, tensors: Tensors) -> set[str]:
        loaded = copies(model, tensors)
        if calls:
            model.bias.data = model.bias.data.clone()
        calls.append(None)
        return loaded

    pushed = Pushed(load)
    for seed in (0, 1, 2):
        assert pushed.push(version(seed)) == loaded_anew(copies, version(seed))
    assert pushed.loading.refusal == "a parameter gets other memory"
    assert pushed.num_loads == 3


def test_a_push_in_a_pause_is_neither_recorded_nor_compared() -> None:
    """Requests wait for it. One that is known is done without the loader."""
    pushed = Pushed(copies)
    for in_pause, num_loads in ((True, 1), (False, 2), (True, 3), (False, 4), (True, 4), (False, 4)):
        assert pushed.push(version(num_loads), in_pause=in_pause) == loaded_anew(copies, version(num_loads))
        assert pushed.num_loads == num_loads


def test_a_fingerprint_is_that_of_the_bytes_and_of_their_places() -> None:
    """Of contents of any size and type."""
    for shape in ((), (0,), (3,), (4096,), (300, 257), (4, 4096, 8)):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
            content = torch.randn(shape).to(dtype)
            assert fingerprint(content) == fingerprint(content.clone())
            if not content.numel():
                continue
            for place in {0, content.numel() // 2, content.numel() - 1}:
                other = content.clone()
                other.view(-1).view(torch.uint8)[place] ^= 1
                assert fingerprint(other) != fingerprint(content)
    rows = torch.randn(64, 8192)
    swapped, rolled = rows.clone(), rows.roll(1, dims=1)
    swapped[[3, 40]] = rows[[40, 3]]
    assert len({fingerprint(each) for each in (rows, swapped, rolled)}) == 3
