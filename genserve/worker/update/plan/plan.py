"""A load that was recorded: its tensors in their order, and what the loader does with each of them.

That is a recipe: operations of torch, in their order, on views of that tensor, of parameters, and of what earlier ones
of these operations made. Where in the parameters is not part of it: the experts of a model have one in common.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Origin = Literal["checkpoint", "parameter", "made"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its memory."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Of this one."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def within(self, base: torch.Tensor, offset: int) -> torch.Tensor:
        """A view of `base` that begins `offset` elements, of this layout's type, after its first one. Raises
        RuntimeError if there is none."""
        typed = base if base.dtype is self.dtype else base.view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operation takes. `number`: of the recipe's places in parameters, or of what was made. `layout`
    is None for the whole tensor. `offset` is in elements of the layout's type; for a parameter the place has it."""

    origin: Origin
    number: int = 0
    layout: Layout | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of torch. Among `args`, and in tuples there, an `Operand` stands for a tensor. `numbers` tells apart
    steps whose arguments are equal but not the same."""

    function: Any
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that is done with one tensor. `layout` and `device` are those of the tensor."""

    layout: Layout
    device: torch.device
    steps: tuple[Step, ...]
    num_places: int

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it is for a tensor like this one."""
        layout = self.layout
        is_typed_alike = tensor.dtype is layout.dtype and tensor.device == self.device
        return is_typed_alike and tensor.shape == layout.size and tensor.stride() == layout.stride

    def follow(self, tensor: torch.Tensor, parameters: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        """Does it with this tensor. `places`: for each of its places the number of a parameter and an offset."""
        made: list[torch.Tensor] = []
        for step in self.steps:
            args = [_filled(arg, tensor, made, parameters, places) for arg in step.args]
            made += tensors_in(step.function(*args, **dict(step.options)))


def _filled(
    arg: Any,
    tensor: torch.Tensor,
    made: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    places: Sequence[int],
) -> Any:
    """The argument with tensors for its operands.

    Not a function within `follow`: one that calls itself is part of a cycle, with the tensor, and that keeps the memory
    of a push until Python looks for cycles."""
    if type(arg) is tuple:
        return tuple(_filled(each, tensor, made, parameters, places) for each in arg)
    if type(arg) is not Operand:
        return arg
    base, offset = tensor, arg.offset
    if arg.origin == "made":
        base = made[arg.number]
    elif arg.origin == "parameter":
        base, offset = parameters[places[2 * arg.number]], places[2 * arg.number + 1]
    return base if arg.layout is None else arg.layout.within(base, offset)


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors that an operation returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for each in result if isinstance(each, torch.Tensor)] if isinstance(result, list | tuple) else []


Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The `names` of the tensors; of each the number of its `recipes` in `followed`; and in `places`, one after
    another, where in the parameters: the number of one, and an offset.

    It takes some 150 bytes for a tensor, most of them for its name."""

    names: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    followed: "array[int]"
    places: "array[int]"

    def replay(self, tensors: Tensors, parameters: Sequence[torch.Tensor]) -> bool:
        """Loads the tensors into the parameters, each before it takes the next one.

        Returns whether they are those of the plan. If not, what the parameters hold then is not a version."""
        i = begin = 0
        for name, tensor in tensors:
            if i == len(self.names) or name != self.names[i]:
                return False
            recipe = self.recipes[self.followed[i]]
            end = begin + 2 * recipe.num_places
            # The operations are as torch's dispatcher saw them: modes above it have had their say.
            with torch._C.DisableTorchFunction():
                if not recipe.takes(tensor):
                    return False
                recipe.follow(tensor, parameters, self.places[begin:end])
            i, begin = i + 1, end
        return i == len(self.names)
