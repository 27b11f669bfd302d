"""Every reference to a tensor in a model, and the way to it.

`tree` knows where weights are exchanged. This module does not use that knowledge: it follows every reference in a
model, through modules, plain objects, dataclasses, slots, containers, closures, partial functions, bound methods and
the attributes of tensors, so that `audit` can find what `tree` misses.

It does not enter objects that cannot hold weights: configurations, process groups, compiled code (which gets the
weights as inputs), adapters, and the objects of libraries without layers.
"""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from genserve.worker.model.tree import MODULE_TABLES, named_modules, without_adapters

MAX_OBJECTS = 5_000_000
"""Limit of objects that are entered. The largest models have some 100,000 modules and parts."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type, type(None))
_ATOM_TYPES = frozenset({*_ATOMS, bool})  # the usual types, without their subclasses

# A type of these modules, or of one below them, is not entered.
_NOT_ENTERED_MODULES = (
    "asyncio", "ast", "ctypes", "concurrent", "enum", "inspect", "logging", "multiprocessing", "numpy", "pathlib", "re",
    "threading", "weakref", "_thread", "_weakref", "_asyncio",
    # Attention kernels' workspaces: they never contain weights.
    "flashinfer.attention", "flashinfer.cascade", "flashinfer.decode", "flashinfer.mla", "flashinfer.prefill",
    "huggingface_hub", "PIL", "pydantic", "ray", "tokenizers", "torch", "transformers", "triton", "zmq",
    "vllm.compilation", "vllm.config", "vllm.distributed", "vllm.inputs", "vllm.lora", "vllm.multimodal",
    "vllm.model_executor.layers.fused_moe.experts.lora_context",
    "vllm.platforms", "vllm.renderers", "vllm.tokenizers", "vllm.transformers_utils",
)  # fmt: skip


class Step(NamedTuple):
    """A step from an object to one that it refers to. `kind`: attribute, item, or variable of a closure."""

    kind: str
    key: Any


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor, and where: `module` is the name of the module that the way begins at, `steps` lead from there to it,
    from one of `owners` each: the module first, and what refers to the tensor last."""

    module: str
    steps: tuple[Step, ...]
    owners: tuple[Any, ...]
    tensor: torch.Tensor

    @property
    def owner(self) -> Any:
        """The object that refers to the tensor."""
        return self.owners[-1]

    @property
    def path(self) -> str:
        """The path in Python's notation, such as `model.layers.0.mlp.experts.quant_method.config.weight_scale`."""
        return self.module + "".join(
            _in_python(step, first=not self.module and i == 0) for i, step in enumerate(self.steps)
        )


def to_tensors(
    model: nn.Module,
    *,
    not_entered: Collection[int] = (),
    skipped_names: Collection[str] = (),
    left_out: Collection[int] = (),
) -> Iterator[Reference]:
    """Every reference to a tensor; the same tensor as often as it is referred to. Not entered are objects whose `id` is
    in `not_entered` and attributes whose name is in `skipped_names`; not yielded are references to tensors whose `id`
    is in `left_out`. Raises ValueError for more than MAX_OBJECTS objects.

    A model of 48 layers refers to some 300,000 values, and steps wait for Python's lock meanwhile: so types are looked
    at once, and a way is put together when a tensor lies at its end."""
    # Wrappers of LoRA are modules too: what they add belongs to adapters, and what they wrap is among the modules. An
    # object is kept while others are looked for: steps run in other threads, and another one may get its id.
    named = named_modules(model)
    seen: dict[int, Any] = {id(module): module for _, module in named}
    queue: deque[_Place] = deque(
        _Place(name, None, "", None, module) for name, module in without_adapters(named).items()
    )
    while queue:
        place = queue.popleft()
        for how, values in _references(place.owner):
            for key, value in values:
                kind = type(value)
                if kind in _ATOM_TYPES or (how == "attribute" and key in skipped_names):
                    continue
                traits = _traits(kind)
                if traits.is_tensor:
                    if id(value) not in left_out:
                        steps, owners = place.way()
                        yield Reference(place.module, (*steps, Step(how, key)), owners, value)
                    if id(value) in seen or not vars(value):
                        continue
                elif id(value) in seen or id(value) in not_entered or _is_not_entered(value, traits):
                    continue
                seen[id(value)] = value
                if len(seen) > MAX_OBJECTS:
                    way = f"{place.module}{place.way()[0]}"
                    raise ValueError(f"the model refers to more than {MAX_OBJECTS} objects, at last to {way}")
                queue.append(_Place(place.module, place, how, key, value))


def follow(modules: Mapping[str, nn.Module], reference: Reference) -> Any:
    """The object at the same place in another model, None if there is no such place. `modules`: that model's, by name
    (`tree.modules_by_name`)."""
    value: Any = modules.get(reference.module)
    for step in reference.steps:
        found = (
            each for how, values in _references(value) if how == step.kind for key, each in values if key == step.key
        )
        value = next(found, None)
        if value is None:
            return None
    return value


class _Place(NamedTuple):
    """An object, and the way to it: from the module, or from `before` by one step."""

    module: str
    before: "_Place | None"
    how: str
    key: Any
    owner: Any

    def way(self) -> tuple[tuple[Step, ...], tuple[Any, ...]]:
        """The steps, and the objects on the way with this one as the last."""
        steps: list[Step] = []
        owners = [self.owner]
        place = self
        while place.before is not None:
            steps.append(Step(place.how, place.key))
            place = place.before
            owners.append(place.owner)
        return tuple(reversed(steps)), tuple(reversed(owners))


_ReferencesByKind = list[tuple[str, Iterable[tuple[Any, Any]]]]
"""The references of an object: kinds of steps, and keys and values of each."""


def _references(owner: Any) -> _ReferencesByKind:
    """Copies of values that may change meanwhile, because steps run in other threads."""
    traits = _traits(type(owner))
    found: _ReferencesByKind = []
    match traits.shape:
        case "function":
            cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
            found.append(("variable", [(key, cell.cell_contents) for key, cell in cells if _is_filled(cell)]))
            defaults = [("__defaults__", owner.__defaults__), ("__kwdefaults__", owner.__kwdefaults__)]
            found.append(("attribute", defaults))
        case "method":
            return [("attribute", [("__self__", owner.__self__)])]
        case "partial":
            parts = [("func", owner.func), ("args", owner.args), ("keywords", owner.keywords)]
            found.append(("attribute", parts))
        case "mapping":
            found.append(("item", list(owner.items())))
        case "items":
            found.append(("item", enumerate(list(owner))))
        case "module":
            # The tables contain what has its own name in the model.
            for table in (owner._parameters, owner._buffers, owner._modules):
                found.append(("attribute", list(table.items())))
    attributes = getattr(owner, "__dict__", None)
    if isinstance(attributes, dict) and attributes:
        named = list(attributes.items())
        if traits.shape == "module":
            named = [(key, value) for key, value in named if key not in MODULE_TABLES]
        found.append(("attribute", named))
    if traits.slots:
        found.append(("attribute", list(_in_slots(owner, traits.slots))))
    return found


def _in_slots(owner: Any, slots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for key, member in slots:
        try:
            yield key, member.__get__(owner)
        except AttributeError:
            continue  # an empty slot


@dataclass(frozen=True, slots=True)
class _Traits:
    """How objects of a type are entered."""

    shape: str
    slots: tuple[tuple[str, Any], ...]
    is_tensor: bool
    is_not_entered: bool


def _traits_of(kind: type) -> _Traits:
    shape = next((shape for shape, kinds in _SHAPES if issubclass(kind, kinds)), "")
    slots: list[tuple[str, Any]] = []
    for each in () if shape == "method" else kind.__mro__:
        keys = vars(each).get("__slots__", ())
        for key in (keys,) if isinstance(keys, str) else keys:
            member: Any = vars(each).get(_mangled(each, key))
            if key not in ("__dict__", "__weakref__") and hasattr(member, "__get__"):
                slots.append((key, member))
    # Modules are entered whoever wrote them.
    is_not_entered = issubclass(kind, (*_ATOMS, QuantizationConfig)) or (
        not issubclass(kind, nn.Module | FunctionType) and _is_not_entered_module(str(kind.__module__))
    )
    return _Traits(shape, tuple(slots), issubclass(kind, torch.Tensor), is_not_entered)


_traits: Callable[[Any], _Traits] = cache(_traits_of)

_SHAPES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("module", (nn.Module,)),
    ("function", (FunctionType,)),
    ("method", (MethodType, BuiltinMethodType)),
    ("partial", (functools.partial,)),
    ("mapping", (Mapping, MappingProxyType)),
    ("items", (list, tuple, deque, Set)),
)


def _mangled(kind: type, key: str) -> str:
    private = key.startswith("__") and not key.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{key}" if private else key


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_not_entered(value: Any, traits: _Traits) -> bool:
    """Whether an object is empty, or of a type that holds no weights."""
    if traits.is_not_entered or (type(value) in _OFTEN_EMPTY and not value):
        return True
    # A wrapper of a function says that it is of the module of what it wraps; its globals do not.
    return traits.shape == "function" and _is_not_entered_module(str(value.__globals__.get("__name__")))


@cache
def _is_not_entered_module(module: str) -> bool:
    return module in _NOT_ENTERED_MODULES or module.startswith(_NOT_ENTERED_PREFIXES)


# Each module has a dozen tables of hooks.
_OFTEN_EMPTY = frozenset({dict, OrderedDict, list, tuple, set})
_NOT_ENTERED_PREFIXES = tuple(f"{name}." for name in _NOT_ENTERED_MODULES)


def _in_python(step: Step, *, first: bool) -> str:
    match step.kind:
        case "item":
            return f"[{step.key!r}]"
        case "variable":
            return f".__closure__.{step.key}"
        case _:
            return step.key if first else f".{step.key}"
