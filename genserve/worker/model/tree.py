"""The places in which a model keeps its weights: parameters, buffers, and attributes that post-processing writes.

vLLM packs weights after loading. On the CPU a packed linear layer is in the closure `cpu_linear` of its layer or, if it
is int8, in a kernel object of the layer's quantisation scheme, and its parameter is empty or gone. MLA keeps derived
tensors as plain attributes, attention keeps scales as numbers. All of these must change together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

NOT_WEIGHTS = frozenset({"kv_cache"})
"""Attributes that belong to requests rather than to the model: never exchanged."""

MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a torch module in which torch keeps what it registers."""

# The modules of classes whose objects are attributes of layers and may hold weights: quantisation methods and schemes,
# kernels, experts, attention implementations.
_PART_PACKAGES = ("vllm.model_executor.", "vllm.models.", "vllm.v1.attention.")
# In one of them, what experts keep of adapters, which are not weights of a version.
_ADAPTER_CONTEXT = "vllm.model_executor.layers.fused_moe.experts.lora_context"


@dataclass(slots=True)
class Holding:
    """One place of a model that holds weights: entry `key` of `table` of a module or of an object in one of its
    attributes. `table` is "_parameters", "_buffers" or "__dict__". The value is a tensor, a closure, a number, or an
    object that owns memory outside of torch, such as oneDNN's packed weight."""

    owner: Any
    table: str
    key: str
    value: Any


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names without LoRA, which wraps a layer and keeps it as `base_layer`."""
    return without_adapters(named_modules(model))


def without_adapters(named: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """`modules_by_name` for the result of `named_modules`."""
    modules: dict[str, nn.Module] = {}
    for name, module in named:
        plain = name.replace(".base_layer", "")
        if plain not in modules or name.endswith(".base_layer"):
            modules[plain] = module
    return modules


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same as torch's, in a fifth of the time: torch's generators pass every name through all the levels above."""
    if type(model).named_modules is not nn.Module.named_modules:
        return list(model.named_modules())
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, module))
            below = [(_joined(name, key), child) for key, child in list(module._modules.items()) if child is not None]
            stack += reversed(below)
    return found


def parameters_and_buffers(named: Iterable[tuple[str, nn.Module]]) -> Iterator[torch.Tensor]:
    """The parameters and buffers of these modules themselves. Shared ones occur several times."""
    for _, module in named:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in list(table.values()) if tensor is not None)


def owners(model: nn.Module) -> dict[str, Any]:
    """The modules, and vLLM's objects in their attributes, each once, by a path that is the same in equal models."""
    return _owners(named_modules(model))


def _owners(named: Sequence[tuple[str, nn.Module]]) -> dict[str, Any]:
    found: dict[str, Any] = dict(without_adapters(named))
    seen = {id(module) for _, module in named}
    queue = list(found.items())
    for path, owner in queue:  # grows while it is walked
        for key, value in list(vars(owner).items()):  # a copy: a step in another thread may add some
            if _role(type(value)) == "part" and id(value) not in seen:
                seen.add(id(value))
                found[_joined(path, key)] = value
                queue.append((_joined(path, key), value))
    return found


def holdings(model: nn.Module) -> dict[str, Holding]:
    """Everything of `model` that loading or post-processing may write, by a name that is the same in equal models."""
    found: dict[str, Holding] = {}
    # An attribute of a layer may refer to its parameters as well: those change in place, so the reference stays valid.
    named = named_modules(model)
    in_place = {id(tensor) for tensor in parameters_and_buffers(named)}
    for path, owner in _owners(named).items():
        if isinstance(owner, nn.Module):
            for table in ("_parameters", "_buffers"):
                for key, tensor in list(vars(owner)[table].items()):
                    if tensor is not None:
                        found[_joined(path, key)] = Holding(owner, table, key, tensor)
        for key, value in list(vars(owner).items()):  # a copy: a step in another thread may add some
            if _role(type(value)) == "weight" and key not in NOT_WEIGHTS and id(value) not in in_place:
                found[_joined(path, key)] = Holding(owner, "__dict__", key, value)
    return found


def held_by(model: nn.Module) -> list[Any]:
    """The model's modules and parts, and each of their tensors: what another model may share with this one."""
    found: list[Any] = []
    for owner in owners(model).values():
        found.append(owner)
        tables = [vars(owner), *(vars(owner)[table] for table in ("_parameters", "_buffers") if table in vars(owner))]
        found += [
            value
            for table in tables
            for key, value in list(table.items())
            if key not in NOT_WEIGHTS and isinstance(value, torch.Tensor)
        ]
    return found


def sizes_of(model: nn.Module) -> list[int]:
    """The sizes of the memory of all tensors of the model, in bytes. Shared memory counts once."""
    storages = [value.untyped_storage() for value in held_by(model) if isinstance(value, torch.Tensor)]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _role_of(kind: type) -> str:
    """What a value of this type is as an attribute of an object: a "weight", which is exchanged whole, a "part", which
    may have weights as attributes, or neither, ""."""
    if issubclass(kind, torch.Tensor | FunctionType | float):
        return "weight"
    # Objects with a destructor own native memory, so they are exchanged whole.
    if kind.__module__.startswith("vllm.") and hasattr(kind, "__del__"):
        return "weight"
    # A configuration is shared by all layers of all models.
    if issubclass(kind, nn.Module | QuantizationConfig | Enum | type) or kind.__dictoffset__ == 0:
        return ""
    ours = kind.__module__.startswith(_PART_PACKAGES) and kind.__module__ != _ADAPTER_CONTEXT
    return "part" if ours or issubclass(kind, QuantizeMethodBase) else ""


_role: Callable[[Any], str] = cache(_role_of)
