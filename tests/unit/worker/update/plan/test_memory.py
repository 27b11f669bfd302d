"""Nothing of a load keeps the memory of its push, not even until Python looks for cycles."""

import gc
import mmap
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.worker.update.plan.loaders import Loader, Model, Pushed, Tensors, copies, version


class Mapping(mmap.mmap):
    """One that can be watched."""


class Arriving:
    """Tensors over a mapping, as those of a push. Only who takes one keeps it."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]], fail_at: str | None = None) -> None:
        self._like, self._fail_at = tensors, fail_at
        contents = [each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, each in tensors]
        self._memory = Mapping(-1, sum(map(len, contents)))
        self._memory.write(b"".join(contents))
        self.mapping = weakref.ref(self._memory)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        offset = 0
        for name, like in self._like:
            if name == self._fail_at:
                raise InterruptedError("cancelled")
            tensor = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
            offset += like.nbytes
            yield name, tensor.view(like.shape)


@pytest.fixture(autouse=True)
def without_collection() -> Iterator[None]:
    """Python frees only what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def is_free_after(pushed: Pushed, tensors: list[tuple[str, torch.Tensor]], fail_at: str | None = None) -> bool:
    """Whether the memory of a push is free when its load has returned, or raised."""
    arriving = Arriving(tensors, fail_at)
    mapping = arriving.mapping
    try:
        pushed.push(arriving)
        assert fail_at is None
    except InterruptedError:
        assert fail_at is not None
    del arriving
    return mapping() is None


def test_the_memory_of_a_push_is_free_after_each_load() -> None:
    """After the one that is recorded, the one that proves it, those that follow it, one of other tensors, and each of
    them when it fails."""
    pushed = Pushed(copies)
    for _ in range(4):
        assert is_free_after(pushed, version(0), fail_at="padded")
        assert is_free_after(pushed, version(0))
    assert pushed.loading.plan is not None
    assert pushed.num_loads == 3  # one of them failed
    assert is_free_after(pushed, version(0)[::-1])
    assert pushed.loading.plan is None


class Allocations(TorchDispatchMode):
    """Counts what a model holds whenever memory for a parameter is allocated."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self.held_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros.default:
            self.held_bytes.append(sum(each.nbytes for each in self._model.parameters()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", [slice(None), slice(None, None, -1)], ids=["proves a plan", "is another one"])
def test_what_is_loaded_twice_needs_no_more_memory(change: slice) -> None:
    """Each parameter is freed before it is allocated again."""
    pushed = Pushed(copies)
    for _ in range(1 if change.step is None else 2):
        pushed.push(version(0))
    with Allocations(pushed.model) as seen:
        pushed.push(version(0)[change])
    sizes = [each.nbytes for each in pushed.model.parameters()]
    assert len(seen.held_bytes) == 2 * len(sizes)
    assert seen.held_bytes[len(sizes) :] == [sum(sizes[:i]) for i in range(len(sizes))]


def looks(model: Model, tensors: Tensors) -> set[str]:
    """At a value."""
    for name, tensor in tensors:
        if float(tensor.sum()) > 1_000:
            model.notes["large"] = True
        copies(model, [(name, tensor)])
    return {"weight", "bias", "padded"}


def fails(model: Model, tensors: Tensors) -> set[str]:
    """In an operation."""
    for name, tensor in tensors:
        copies(model, [(name, tensor)])
        if name == "bias.second":
            try:
                model.weight.data.copy_(tensor[:0])
            except RuntimeError as error:
                raise InterruptedError("of another shape") from error
    return {"weight", "bias", "padded"}


def later() -> Loader:
    """Does something else at the second load."""
    calls: list[None] = []

    def load(model: Model, tensors: Tensors) -> set[str]:
        loaded = copies(model, tensors)
        calls.append(None)
        model.total.data.fill_(len(calls))
        return loaded

    return load


@pytest.mark.parametrize("loader", [looks, later()], ids=["looks at values", "has a state"])
def test_the_memory_of_a_push_is_free_where_no_plan_is_made(loader: Loader) -> None:
    """Whenever that is seen."""
    pushed = Pushed(loader)
    for _ in range(3):
        assert is_free_after(pushed, version(0))
        assert is_free_after(pushed, version(0), fail_at="padded")
    assert pushed.loading.refusal != ""


def test_the_memory_of_a_push_is_free_when_an_operation_fails() -> None:
    """While it is recorded."""
    pushed = Pushed(fails)
    for _ in range(2):
        assert is_free_after(pushed, version(0), fail_at="by the loader")


@pytest.mark.slow
def test_a_plan_takes_little_memory() -> None:
    """The largest models have 45,000 tensors, and a plan on each rank."""
    num_tensors = 2_000
    tensors = [(f"model.layers.0.mlp.experts.{i}.gate_proj.weight", torch.ones(1)) for i in range(num_tensors)]

    def load(model: Model, tensors: Tensors) -> None:
        for i, (_, tensor) in enumerate(tensors):
            model.weight.data.view(-1)[i % 16 : i % 16 + 1].copy_(tensor)

    pushed = Pushed(load)
    for _ in range(2):
        pushed.push(tensors)  # what is made once, or kept to be used again
    pushed.loading = type(pushed.loading)(pushed.structure, torch.device("cpu"))
    tracemalloc.start()
    try:
        pushed.push(tensors)
        pushed.push(tensors)
        size_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pushed.loading.plan is not None
    assert len(pushed.loading.plan.recipes) == 1
    assert size_bytes / num_tensors < 60  # and its name, which is there already
