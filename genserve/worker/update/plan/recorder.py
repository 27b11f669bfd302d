"""Sees what a loader does with the tensors of a checkpoint, and whether that can be done again without the loader.

It can if each operation on those tensors, or on the parameters, returns views of them, or is a known one (`_traits`)
that moves or computes elements, into a parameter, or into a new tensor that is used before the loader takes the next
one of the checkpoint. So a loader that looks at a value, collects tensors, mixes in others, or writes elsewhere is not
recorded. What it leaves on Python's objects is not seen here (`loading.Attributes`).
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from genserve.worker.update.plan.plan import Layout, Operand, Origin, Plan, Recipe, Step, Tensors, tensors_in

_ATEN = torch.ops.aten
# Known operations: these, and those on one element at a time, which have a tag of torch's.
_MOVING: Final = frozenset(
    {
        _ATEN.copy_.default,
        _ATEN.fill_.Scalar,
        _ATEN.zero_.default,
        _ATEN._to_copy.default,
        _ATEN.cat.default,
        _ATEN.constant_pad_nd.default,
    }
)
_UNPREDICTABLE: Final = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
_UNSEEN: Final = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.tolist,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
        torch.Tensor.__dlpack__,
        torch.Tensor.__repr__,
    }
)
"""Ways to the elements of a tensor that are no operations of torch."""
VIEWING: Final = frozenset(
    {
        torch.Tensor.data.__get__,
        torch.Tensor.__getitem__,
        torch.Tensor.narrow,
        torch.Tensor.select,
        torch.Tensor.t,
        torch.Tensor.transpose,
        torch.Tensor.unbind,
        torch.Tensor.unsqueeze,
        torch.Tensor.view,
    }
)
"""Functions that return views and do nothing else, if their other arguments are integers."""


class Recorder(TorchDispatchMode):
    """Records one load, in one thread. `refusal` says why it cannot be done again, "" as long as it can."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """`parameters`: the tensors that the loader may write, each with memory of its own."""
        super().__init__()
        self.refusal = ""
        self.written: set[int] = set()
        """The numbers of the parameters that were written."""
        self._parameters = parameters
        self._of_parameters = {memory_of(each): number for number, each in enumerate(parameters) if each.numel()}
        self._tensor: torch.Tensor | None = None  # that the loader has taken last
        self._made: list[torch.Tensor] = []
        self._origins: dict[int, tuple[Origin, int]] = {}  # by memory
        self._steps: list[Step] = []
        self._names: list[str] = []
        self._recipes: dict[Recipe, int] = {}
        self._followed = array("l")
        self._here = array("q")  # places of this tensor
        self._places = array("q")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the operations of this thread in the block."""
        with ExitStack() as stack:
            stack.enter_context(_Looks(self))
            stack.enter_context(self)
            yield

    def tensors(self, tensors: Tensors) -> Tensors:
        """The same, for the loader to take."""
        arriving = iter(tensors)
        while True:
            with torch._C._DisableTorchDispatch():
                arrived = next(arriving, None)
            if arrived is None:
                return
            with torch._C.DisableTorchFunction():
                self._begin(*arrived)
            yield arrived

    def plan(self) -> Plan:
        """The plan that was recorded, when the loader has returned. Raises ValueError with the refusal."""
        self._end()
        if self.refusal:
            raise ValueError(self.refusal)
        return Plan(tuple(self._names), tuple(self._recipes), self._followed, self._places)

    def refuse(self, why: str) -> None:
        """Ends the recording."""
        self.refusal = self.refusal or why
        self._tensor, self._made, self._steps, self._origins = None, [], [], {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no operation is compiled while a mode is on, and torch's guard for it takes as long as a view."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.is_view or self.refusal:
            return func(*args, **options)
        with torch._C.DisableTorchFunction():
            try:
                step = self._step(func, args, options)
            except _CannotError as error:
                self.refuse(f"{func} {error}")
                step = None
        result = func(*args, **options)
        if step is not None and not self.refusal:
            with torch._C.DisableTorchFunction():
                self._add(step, result)
        return result

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Whether it shares memory with the tensor of the checkpoint, with a parameter, or with what was made."""
        memory = _memory_of(tensor)
        return memory in self._origins or memory in self._of_parameters

    def _begin(self, name: str, tensor: torch.Tensor) -> None:
        self._end()
        if tensor.layout is not torch.strided:
            self.refuse(f"{name} is not strided")
        if not self.refusal:
            self._tensor = tensor
            self._names.append(name)
            self._origins = {_memory_of(tensor): ("checkpoint", 0)}

    def _end(self) -> None:
        """Of what is done with the tensor that was taken last."""
        if self._tensor is None:
            return
        steps, num_places = tuple(self._steps), len(self._here) // 2
        recipe = Recipe(Layout.of(self._tensor), self._tensor.device, steps, num_places)
        try:
            self._followed.append(self._recipes.setdefault(recipe, len(self._recipes)))
        except TypeError as error:
            self.refuse(f"an operation takes what cannot be kept: {error}")
        self._places += self._here
        self._tensor, self._made, self._steps, self._here, self._origins = None, [], [], array("q"), {}

    def _step(self, func: Any, args: Any, options: Any) -> Step | None:
        """The operation, if it has to be done again. Raises _CannotError."""
        traits = _traits(func)
        if traits.writes_by_name:
            raise _CannotError("writes to an argument by name")
        tensors = _tensors_among([*args, *options.values()])
        written = [tensor for i in traits.written for tensor in tensors_in(args[i])]
        if written and not any(each.numel() for each in written):
            return None
        if not any(self.is_tracked(each) for each in tensors):
            if written:
                raise _CannotError("writes to a tensor that is not a parameter")
            return None
        if not traits.is_known:
            raise _CannotError("is not known")
        if self._tensor is None:
            raise _CannotError("comes before the first tensor")
        for each in written:
            origin, number = self._origin(each)
            if origin == "checkpoint":
                raise _CannotError("writes to the checkpoint")
            if origin == "parameter":
                self.written.add(number)
        if _tensors_among(options.values()):
            raise _CannotError("takes a tensor by name")
        named = tuple((key, self._filled(value)) for key, value in sorted(options.items()))
        return Step(func, self._filled(args), named, _numbers_among([*args, *options.values()]))

    def _add(self, step: Step, result: Any) -> None:
        self._steps.append(step)
        for tensor in tensors_in(result):
            if not self.is_tracked(tensor):
                self._origins[_memory_of(tensor)] = ("made", len(self._made))
            self._made.append(tensor)

    def _filled(self, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return tuple(self._filled(each) for each in arg)
        return self._operand(arg) if isinstance(arg, torch.Tensor) else arg

    def _operand(self, tensor: torch.Tensor) -> Operand:
        origin, number = self._origin(tensor)
        base = self._base(origin, number)
        layout = Layout.of(tensor)
        offset = 0 if tensor is base else _offset(tensor, base)
        if tensor is not base and not (_is_inside(tensor, offset, base) and _same_view(layout, base, offset, tensor)):
            raise _CannotError("takes a view that cannot be made again")
        if origin == "parameter":
            self._here.extend((number, offset))
            return Operand(origin, len(self._here) // 2 - 1, layout)
        is_whole = offset == 0 and layout == Layout.of(base)
        return Operand(origin, number, None if is_whole else layout, 0 if is_whole else offset)

    def _origin(self, tensor: torch.Tensor) -> tuple[Origin, int]:
        memory = _memory_of(tensor)
        found = self._origins.get(memory)
        if found is not None:
            return found
        if memory in self._of_parameters:
            return "parameter", self._of_parameters[memory]
        raise _CannotError("takes a tensor that is neither this one of the checkpoint nor a parameter")

    def _base(self, origin: Origin, number: int) -> torch.Tensor:
        if origin == "parameter":
            return self._parameters[number]
        if origin == "made":
            return self._made[number]
        assert self._tensor is not None
        return self._tensor


class _CannotError(Exception):
    """An operation cannot be recorded."""


class _Looks(TorchFunctionMode):
    """Sees when the elements of a tensor are reached in a way that is not an operation. Leaves most views to torch:
    they are most of the operations of a loader, and to look at one takes five times as long as to make it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWING and _is_plain(args) and not kwargs:
            with torch._C._DisableTorchDispatch():
                return func(*args)
        if func in _UNSEEN and not self._recorder.refusal:
            with torch._C.DisableTorchFunction():
                if self._recorder.is_tracked(args[0]):
                    self._recorder.refuse(f"Tensor.{func.__name__} is called")
        return func(*args, **kwargs) if kwargs else func(*args)


def _is_plain(args: Any) -> bool:
    """Whether they are a tensor that torch itself has the operations for, and integers."""
    is_torchs = type(args[0]).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_torchs and all(type(arg) is int for arg in args[1:])


@dataclass(frozen=True, slots=True)
class _Traits:
    """Of an operation. `is_known`: it gives the same bits for the same arguments, and depends on elements in no other
    way; `written`: the numbers of the arguments that it writes to; `writes_by_name`: to others as well."""

    is_known: bool
    written: tuple[int, ...]
    writes_by_name: bool


@cache
def _traits(func: Any) -> _Traits:
    written = [
        (number, argument)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    is_pointwise = torch.Tag.pointwise in func.tags and _UNPREDICTABLE.isdisjoint(func.tags)
    return _Traits(
        func in _MOVING or (func.namespace == "aten" and is_pointwise),
        tuple(number for number, argument in written if not argument.kwarg_only),
        any(argument.kwarg_only for _, argument in written),
    )


def _tensors_among(args: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, and in lists there."""
    return [tensor for arg in args for tensor in tensors_in(arg)]


def _numbers_among(arg: Any) -> tuple[str, ...]:
    """The numbers among arguments, as they are written: 0, False, 0.0 and -0.0 are equal, and not the same."""
    if isinstance(arg, list | tuple):
        return tuple(number for each in arg for number in _numbers_among(each))
    return (repr(arg),) if isinstance(arg, int | float | complex) else ()


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor as long as it is there; 0 for one without. No recorder sees the question."""
    with torch._C.DisableTorchFunction():
        return _memory_of(tensor)


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Elements of `tensor` from the first one of `base`, with which it shares memory, to its own first one."""
    begin = tensor.storage_offset() * tensor.itemsize - base.storage_offset() * base.itemsize
    if begin % tensor.itemsize:
        raise _CannotError("takes a view that is not aligned")
    return int(begin // tensor.itemsize)


def _is_inside(tensor: torch.Tensor, offset: int, base: torch.Tensor) -> bool:
    """Several tensors of a checkpoint may share memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or (offset >= 0 and (offset + last + 1) * tensor.itemsize <= base.nbytes)


def _same_view(layout: Layout, base: torch.Tensor, offset: int, tensor: torch.Tensor) -> bool:
    """Whether the view that will be made is that tensor."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.dtype is base.dtype:
        return True
    try:
        again = layout.within(base, offset)
    except RuntimeError:
        return False
    return (again.storage_offset(), again.dtype) == (tensor.storage_offset(), tensor.dtype)
