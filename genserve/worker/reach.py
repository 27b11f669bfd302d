"""Every tensor that a model can reach, and the way to it.

`tree` knows where weights are exchanged. This module knows nothing of that: it follows every reference that a model
holds, through modules, plain objects, dataclasses, slots, containers, closures, partial functions, bound methods and
the attributes of tensors, so that `audit` can tell what `tree` does not see.

What cannot hold weights is not entered: configurations, process groups, compiled code (it gets the weights as inputs),
adapters, and the objects of libraries that bring no layers.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from genserve.worker.tree import modules_by_name

MAX_OBJECTS = 5_000_000
"""Objects that are looked into. The largest models have some 100,000 modules and parts."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type, type(None))

# A type of these modules, or of one below them, is not entered.
_OUTSIDE = (
    "asyncio", "ast", "ctypes", "concurrent", "enum", "inspect", "logging", "multiprocessing", "numpy", "pathlib", "re",
    "threading", "weakref", "_thread", "_weakref", "_asyncio",
    # Attention kernels' workspaces: they are never given weights.
    "flashinfer.attention", "flashinfer.cascade", "flashinfer.decode", "flashinfer.mla", "flashinfer.prefill",
    "huggingface_hub", "PIL", "pydantic", "ray", "tokenizers", "torch", "transformers", "triton", "zmq",
    "vllm.compilation", "vllm.config", "vllm.distributed", "vllm.inputs", "vllm.lora", "vllm.multimodal",
    "vllm.model_executor.layers.fused_moe.experts.lora_context",
    "vllm.platforms", "vllm.renderers", "vllm.tokenizers", "vllm.transformers_utils",
)  # fmt: skip


class Step(NamedTuple):
    """From an object to one that it refers to. `kind`: attribute, item, or variable of a closure."""

    kind: str
    key: Any


@dataclass(frozen=True, slots=True)
class Reached:
    """A tensor, and where: `module` is the name of the module that the way begins at, `steps` lead from there to it.
    `owner` is what refers to it in the last step."""

    module: str
    steps: tuple[Step, ...]
    owner: Any
    tensor: torch.Tensor

    @property
    def path(self) -> str:
        """The way in Python's notation, such as `model.layers.0.mlp.experts.quant_method.config.weight_scale`."""
        return self.module + "".join(
            _written(step, first=not self.module and i == 0) for i, step in enumerate(self.steps)
        )


def tensors(model: nn.Module, *, closed: Collection[int] = (), skipped: Collection[str] = ()) -> Iterator[Reached]:
    """Every reference to a tensor; the same tensor as often as it is referred to. Objects whose `id` is in `closed` and
    attributes whose name is in `skipped` are not entered. Raises ValueError when there is no end to it."""
    modules = modules_by_name(model)
    # Wrappers of LoRA are modules too: what they add belongs to adapters, and what they wrap is among `modules`.
    seen = {id(module) for module in model.modules()} | set(closed)
    queue: deque[tuple[str, tuple[Step, ...], Any]] = deque((name, (), module) for name, module in modules.items())
    while queue:
        name, steps, owner = queue.popleft()
        for step, value in _references(owner):
            if isinstance(value, _ATOMS) or (step.kind == "attribute" and step.key in skipped):
                continue
            way = (*steps, step)
            if isinstance(value, torch.Tensor):
                yield Reached(name, way, owner, value)
                if id(value) in seen or not vars(value):
                    continue
            elif id(value) in seen or _is_outside(value):
                continue
            seen.add(id(value))
            if len(seen) > MAX_OBJECTS:
                raise ValueError(f"the model refers to more than {MAX_OBJECTS} objects, at last to {name}{way}")
            queue.append((name, way, value))


def follow(model: nn.Module, reached: Reached) -> Any:
    """What lies at the same place in another model, None if there is no such place."""
    value: Any = modules_by_name(model).get(reached.module)
    for step in reached.steps:
        value = next((found for each, found in _references(value) if each == step), None)
        if value is None:
            return None
    return value


def _references(owner: Any) -> Iterator[tuple[Step, Any]]:
    """What an object refers to. Copies of what may change meanwhile: steps run in other threads."""
    match owner:
        case FunctionType():
            cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
            yield from ((Step("variable", key), cell.cell_contents) for key, cell in cells if _is_filled(cell))
            yield from _attributes({"__defaults__": owner.__defaults__, "__kwdefaults__": owner.__kwdefaults__})
        case MethodType() | BuiltinMethodType():
            yield Step("attribute", "__self__"), owner.__self__
            return
        case functools.partial():
            yield from _attributes({"func": owner.func, "args": owner.args, "keywords": owner.keywords})
        case Mapping() | MappingProxyType():
            yield from ((Step("item", key), value) for key, value in list(owner.items()))
        case list() | tuple() | deque():
            yield from ((Step("item", i), value) for i, value in enumerate(list(owner)))
        case Set():
            yield from ((Step("item", i), value) for i, value in enumerate(list(owner)))
    if isinstance(owner, nn.Module):
        # The tables hold what has a name of its own in the model.
        for table in (owner._parameters, owner._buffers, owner._modules):
            yield from _attributes(table)
    yield from _attributes({k: v for k, v in _dict_of(owner).items() if k not in _TABLES})
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            member: Any = vars(kind).get(_mangled(kind, key))
            if key not in ("__dict__", "__weakref__") and hasattr(member, "__get__"):
                try:
                    yield Step("attribute", key), member.__get__(owner)
                except AttributeError:
                    continue  # a slot that is empty


_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def _attributes(named: Mapping[str, Any]) -> Iterable[tuple[Step, Any]]:
    return [(Step("attribute", key), value) for key, value in named.items()]


def _dict_of(owner: Any) -> dict[str, Any]:
    found = getattr(owner, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def _mangled(kind: type, key: str) -> str:
    private = key.startswith("__") and not key.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{key}" if private else key


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_outside(value: Any) -> bool:
    """Whether an object is of a kind that holds no weights. Modules are looked into whoever wrote them."""
    if isinstance(value, nn.Module | QuantizationConfig):
        return isinstance(value, QuantizationConfig)
    # A wrapper of a function says that it is of the module of what it wraps; its globals do not.
    kind = value.__globals__.get("__name__") if isinstance(value, FunctionType) else type(value).__module__
    return str(kind).startswith(_BELOW_OUTSIDE) or kind in _OUTSIDE


_BELOW_OUTSIDE = tuple(f"{name}." for name in _OUTSIDE)


def _written(step: Step, *, first: bool) -> str:
    match step.kind:
        case "item":
            return f"[{step.key!r}]"
        case "variable":
            return f".__closure__.{step.key}"
        case _:
            return step.key if first else f".{step.key}"
