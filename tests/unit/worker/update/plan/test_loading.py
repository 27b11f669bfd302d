"""Which loads are done again without the loader, and that they leave the same. vLLM's: tests/engine/test_kinds.py."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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

WEIGHT = "weight.first"


def also(act: Any, *, at: str = WEIGHT) -> Loader:
    """A loader that copies, and does something more with the model and one tensor."""

    def load(model: Model, tensors: Tensors) -> set[str]:
        def seen() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                yield name, tensor
                if name == at:
                    act(model, tensor)

        return copies(model, seen())

    return load


def set_step(model: Model, _: torch.Tensor) -> None:
    """An attribute with a plain value, and another one that is equal to what it was and not the same."""
    model.step = {"scales": ["float8"]}
    model.zero = -0.0


def computed(model: Model, tensor: torch.Tensor) -> None:
    """As Mamba's loaders, from what is in the parameter already."""
    model.bias.data.copy_(-torch.exp(model.weight.data.view(-1)[:4].float()) + tensor.reshape(-1)[4:].to(torch.float16))


def joined(model: Model, tensor: torch.Tensor) -> None:
    """Through new tensors, and as bytes."""
    model.padded.data[:2, :2].copy_(torch.cat([tensor[:1, :2].contiguous(), tensor[1:, :2].clone()]))
    model.padded.data[2].view(torch.uint8).copy_(tensor[1].view(torch.uint8))
    model.bias.data.copy_(nn.functional.pad(tensor[0, :2], (1, 1)))
    model.weight.data[3].zero_()


def zeros(model: Model, tensors: Tensors) -> set[str]:
    """Does the same with two tensors, but for a number that is equal and not the same."""
    for name, tensor in tensors:
        copies(model, [(name, tensor)])
        if name.startswith("bias"):
            model.bias.data.view(2, 2)[int(name == "bias.second")].fill_(-0.0 if name == "bias.second" else 0.0)
    return {"weight", "bias", "padded"}


def added(model: Model, tensor: torch.Tensor) -> None:
    """To what is there."""
    model.total.data.add_(tensor[0])


def nothing(model: Model, _: torch.Tensor) -> None:
    """Writes to a part of a buffer that has no elements."""
    model.buffer[:0].fill_(1)


def silent(model: Model, tensors: Tensors) -> None:
    """Does not say what it has loaded."""
    copies(model, tensors)


RECORDED = {
    "copies": copies,
    "an attribute": also(set_step),
    "elements computed": also(computed),
    "new tensors": also(joined, at="padded"),
    "numbers": zeros,
    "writes nothing": also(nothing),
    "adds": also(added),
    "says nothing": silent,
}


@pytest.mark.parametrize("loader", RECORDED.values(), ids=RECORDED)
def test_load_like_the_two_before_skips_the_loader_with_equal_result(loader: Loader) -> None:
    """Bit for bit: contents, attributes, and what the loader says."""
    pushed = Pushed(loader)
    for number, seed in enumerate((0, 1, 2, 1, 0)):
        if (step := vars(pushed.model).pop("step", None)) is not None:
            step["scales"].append("by whoever uses it")
        assert pushed.push(version(seed)) == loaded_anew(loader, version(seed))
        assert pushed.loading.refusal == ""
        assert pushed.num_loads == min(number + 1, 2)


def collected(model: Model, tensors: Tensors) -> set[str]:
    """Takes all tensors before it copies the first one."""
    return copies(model, list(tensors))


def kept(model: Model, tensors: Tensors) -> set[str]:
    """Copies a tensor when the next one is there."""
    before: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        copies(model, before)
        before = [(name, tensor)]
    copies(model, before)
    return {"weight", "bias", "padded"}


def neighbour(model: Model, tensors: Tensors) -> set[str]:
    """Copies a tensor again when the next one is there, which lies in the same memory."""
    before: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        copies(model, [(name, tensor), *(before if name == "bias.second" else ())])
        before = [(name, tensor)]
    return {"weight", "bias", "padded"}


def looked(model: Model, tensor: torch.Tensor) -> None:
    """At a value."""
    if float(tensor[0, 0]) > 100:
        model.notes["large"] = True


def new_parameter(model: Model, _: torch.Tensor) -> None:
    """In the place of one."""
    model.bias = nn.Parameter(torch.ones(4), requires_grad=False)


def new_memory(model: Model, tensor: torch.Tensor) -> None:
    """Of a parameter."""
    model.bias.data = tensor.reshape(-1)[:4]


NOT_RECORDED: dict[str, tuple[Loader, str]] = {
    "looks at a value": (also(looked), "aten._local_scalar_dense.default is not known"),
    "views a part that a value says": (
        also(lambda model, tensor: tensor.narrow(0, (tensor[0, 0] > 0).to(torch.int64), 1)),
        "aten._local_scalar_dense.default is not known",
    ),
    "takes the elements that values say": (
        also(lambda model, tensor: tensor[tensor > 0]),
        "aten.index.Tensor is not known",
    ),
    "compares": (also(lambda model, tensor: torch.equal(tensor, tensor)), "aten.equal.default is not known"),
    "calls another library": (also(lambda model, tensor: tensor.numpy().sum()), "Tensor.numpy is called"),
    "makes a list": (also(lambda model, tensor: tensor.tolist()), "Tensor.tolist is called"),
    "takes an address": (also(lambda model, tensor: model.weight.data_ptr()), "Tensor.data_ptr is called"),
    "prints": (also(lambda model, tensor: str(tensor)), "Tensor.__repr__ is called"),
    "sums": (also(lambda model, tensor: model.bias.data.copy_(tensor.sum(1))), "aten.sum.dim_IntList is not known"),
    "adds chance": (
        also(lambda model, tensor: model.bias.data.copy_(torch.rand_like(tensor)[:, 0])),
        "aten.rand_like.default is not known",
    ),
    "mixes in a table": (
        also(lambda model, tensor: model.bias.data.copy_(tensor[:, 0] + model.order)),
        "takes a tensor that is neither this one of the checkpoint nor a parameter",
    ),
    "writes by name": (
        also(lambda model, tensor: torch.neg(tensor[:, 0], out=model.bias.data)),
        "writes to an argument by name",
    ),
    "writes a buffer": (
        also(lambda model, tensor: model.buffer.copy_(tensor[:, 0])),
        "takes a tensor that is neither",
    ),
    "fills a buffer": (also(lambda model, _: model.buffer.fill_(1)), "writes to a tensor that is not a parameter"),
    "writes the checkpoint": (also(lambda model, tensor: tensor.fill_(1)), "writes to the checkpoint"),
    "begins with a parameter": (
        lambda model, tensors: copies(model, tensors) if model.bias.data.fill_(1) is not None else None,
        "comes before the first tensor",
    ),
    "keeps a tensor": (also(lambda model, tensor: model.notes.update(kept=tensor)), "changes notes of a Model"),
    "makes a parameter": (also(new_parameter, at="padded"), "changes _parameters of a Model"),
    "gives new memory": (also(new_memory, at="padded"), "a parameter gets other memory"),
    "collects tensors": (collected, "takes a tensor that is neither"),
    "copies later": (kept, "takes a tensor that is neither"),
    "copies a neighbour later": (neighbour, "takes a view that cannot be made again"),
    "copies in a thread": (elsewhere("padded"), "it is not seen how padded is loaded"),
    "makes a copy as Python does": (also(lambda model, tensor: deepcopy(tensor)), "takes a tensor that is neither"),
}


@pytest.mark.parametrize(("loader", "why"), NOT_RECORDED.values(), ids=NOT_RECORDED)
def test_what_cannot_be_done_again_is_always_done_by_the_loader(loader: Loader, why: str) -> None:
    """The refusal says why, and each version is as the loader leaves it."""
    pushed = Pushed(loader)
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        found = pushed.push(version(seed))
        torch.manual_seed(seed)
        expected = loaded_anew(loader, version(seed))
        assert {**found, "notes": None} == {**expected, "notes": None}
        assert why in pushed.loading.refusal
    assert pushed.loading.plan is None
    assert pushed.num_loads == 3


def other_name(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """In the middle."""
    tensors[2] = ("bias.third", tensors[2][1])


def other_type(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """In the middle."""
    tensors[2] = (tensors[2][0], tensors[2][1].double())


def other_shape(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Which the loader does not take."""
    tensors[2] = (tensors[2][0], torch.ones(3))


def other_strides(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """At the beginning."""
    tensors[0] = (tensors[0][0], tensors[0][1].t().contiguous().t())


def other_order(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """At the end."""
    tensors[-2:] = reversed(tensors[-2:])


def one_less(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """At the end."""
    del tensors[-1]


def one_more(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """At the end."""
    tensors.append(("bias.first", torch.ones(2)))


@pytest.mark.parametrize(
    "change", [other_name, other_type, other_shape, other_strides, other_order, one_less, one_more]
)
def test_push_of_other_tensors_is_reloaded_with_equal_result_or_error(change: Any) -> None:
    """What was done until then is undone; and later pushes like it are done without the loader."""

    def outcome(pushed: Pushed) -> Any:
        tensors = version(1)
        change(tensors)
        try:
            return pushed.push(tensors)
        except RuntimeError as error:
            return str(error)

    pushed, anew = Pushed(also(added)), Pushed(also(added))
    for seed in (0, 1):
        pushed.push(version(seed))
    assert pushed.loading.plan is not None
    expected = outcome(anew)
    for number in range(3):
        assert outcome(pushed) == expected
        assert pushed.num_loads == 3 + number if isinstance(expected, str) else min(3 + number, 4)


def test_pushes_that_differ_every_time_are_not_recorded_for_ever() -> None:
    """A recording makes a load slower. Now and then another push is no reason to stop."""
    pushed = Pushed(copies)
    for seed in range(3):
        pushed.push(version(seed))
        pushed.push(version(seed))
        pushed.push(version(seed)[::-1])
    assert pushed.loading.refusal == ""
    for number in range(7):
        assert pushed.loading.refusal == ""
        pushed.push(version(number)[:: -1 if number % 2 else 1])
    assert "seldom" in pushed.loading.refusal
    assert pushed.push(version(7)) == loaded_anew(copies, version(7))


def test_each_tensor_is_copied_before_the_next_one_is_asked_for() -> None:
    """The next one may not have arrived, and its preparation may be cancelled."""
    pushed, wanted = Pushed(copies), version(1)
    for seed in (0, 1):
        pushed.push(version(seed))

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        yield wanted[0]
        assert torch.equal(pushed.model.weight.data[:2], wanted[0][1].t().to(torch.bfloat16))
        assert not pushed.model.weight.data[2:].any()
        yield wanted[1]
        raise InterruptedError("cancelled")

    assert pushed.loading.plan is not None
    with pytest.raises(InterruptedError):
        pushed.push(arriving())
    assert pushed.push(wanted) == loaded_anew(copies, wanted)
    assert pushed.num_loads == 2


class Copies(TorchDispatchMode):
    """Sees copies, as the pinned ring of a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_copies_go_the_way_that_the_device_has_for_them() -> None:
    """Those that are recorded, those that prove the recording, and those that are done again."""
    pushed = Pushed(copies)
    shapes = [(2, 4), (2, 4), (2,), (2,), (2, 4)]
    for expected in (shapes, [*shapes, *shapes], shapes):
        with Copies() as seen:
            pushed.push(version(len(expected)))
        assert seen.shapes == expected
    assert pushed.num_loads == 2
