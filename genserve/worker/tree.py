"""Where a model keeps its weights: parameters, buffers, and what post-processing left in attributes.

vLLM packs weights after loading. On the CPU a packed linear lives in the closure `cpu_linear` of its layer or, if it is
int8, in a kernel object of the layer's quantisation scheme, and the parameter it came from is empty or gone. MLA keeps
derived tensors as plain attributes, attention keeps scales as numbers. All of those must change together.
"""

from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

# State of requests rather than of the model: never exchanged.
NOT_WEIGHTS = frozenset({"kv_cache"})

# Where the classes of objects live that hang on layers and may hold weights: quantisation methods and schemes, kernels,
# experts, attention implementations.
_PART_PACKAGES = ("vllm.model_executor.", "vllm.models.", "vllm.v1.attention.")


@dataclass(slots=True)
class Holding:
    """One place of a model that holds weights: entry `key` of `table` of a module or of an object that hangs on one.
    `table` is "_parameters", "_buffers" or "__dict__". The value is a tensor, a closure, a number, or an object that
    owns memory outside of torch, such as oneDNN's packed weight."""

    owner: Any
    table: str
    key: str
    value: Any


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name they have without LoRA, which wraps a layer and keeps the layer as `base_layer`."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        plain = name.replace(".base_layer", "")
        if plain not in modules or name.endswith(".base_layer"):
            modules[plain] = module
    return modules


def owners(model: nn.Module) -> dict[str, Any]:
    """The modules, and the objects of vLLM that hang on them, each once, by a path that is the same in equal models."""
    found: dict[str, Any] = dict(modules_by_name(model))
    seen = {id(module) for module in model.modules()}
    queue = list(found.items())
    for path, owner in queue:  # grows while it is walked
        for key, value in list(vars(owner).items()):  # a step may add some meanwhile
            if _is_part(value) and id(value) not in seen:
                seen.add(id(value))
                found[_joined(path, key)] = value
                queue.append((_joined(path, key), value))
    return found


def holdings(model: nn.Module) -> dict[str, Holding]:
    """Everything of `model` that loading or post-processing may write, by a name that is the same in equal models."""
    found: dict[str, Holding] = {}
    # What hangs on a layer may refer to its parameters as well: those change in place, so the reference is good.
    in_place = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for path, owner in owners(model).items():
        if isinstance(owner, nn.Module):
            for table in ("_parameters", "_buffers"):
                for key, tensor in vars(owner)[table].items():
                    if tensor is not None:
                        found[_joined(path, key)] = Holding(owner, table, key, tensor)
        for key, value in list(vars(owner).items()):  # a step may add some meanwhile
            if key in NOT_WEIGHTS or id(value) in in_place:
                continue
            if isinstance(value, torch.Tensor | FunctionType | float) or _owns_memory(value):
                found[_joined(path, key)] = Holding(owner, "__dict__", key, value)
    return found


def held_by(model: nn.Module) -> list[Any]:
    """The model's modules and parts, and every tensor that one of them has: what another model that has it too shares
    with this one."""
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
    """Of the memory of every tensor that the model holds, in bytes; what several look into counts once."""
    storages = [value.untyped_storage() for value in held_by(model) if isinstance(value, torch.Tensor)]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_part(value: Any) -> bool:
    if isinstance(value, nn.Module | QuantizationConfig | Enum | type) or not hasattr(value, "__dict__"):
        return False  # a configuration is shared by all layers of all models
    ours = type(value).__module__.startswith(_PART_PACKAGES) or isinstance(value, QuantizeMethodBase)
    return ours and not _owns_memory(value)


def _owns_memory(value: Any) -> bool:
    """Whether an object frees something when it goes: it changes places whole, for what it refers to is its alone."""
    return type(value).__module__.startswith("vllm.") and hasattr(type(value), "__del__")
