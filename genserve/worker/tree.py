"""Where a model keeps its weights: parameters, buffers, and what post-processing left in attributes.

vLLM packs weights after loading. On the CPU a packed linear lives in the closure `cpu_linear` of its layer, and the
parameter it came from is empty; MLA keeps derived tensors as plain attributes. All of those must change together.
"""

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

# State of requests rather than of the model: never exchanged.
_NOT_WEIGHTS = frozenset({"kv_cache"})


@dataclass(slots=True)
class Holding:
    """One place of a model that holds weights: entry `key` of `table`, a module's dict of parameters, of buffers, or of
    attributes."""

    module: nn.Module
    table: str
    key: str
    value: Any


def require_exchangeable(model: nn.Module, device: torch.device) -> None:
    """Raises ValueError for a model whose packed weights lie where `holdings` does not look.

    On the CPU the experts of a mixture are packed into an object of the layer's quantisation method: exchanging
    parameters would leave the old experts in use.
    """
    for name, module in model.named_modules():
        if device.type == "cpu" and isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase):
            raise ValueError(f"{name}: weights of mixture-of-experts layers cannot be exchanged on the CPU yet")


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name they have without LoRA, which wraps a layer and keeps the layer as `base_layer`."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        plain = name.replace(".base_layer", "")
        if plain not in modules or name.endswith(".base_layer"):
            modules[plain] = module
    return modules


def holdings(model: nn.Module) -> dict[str, Holding]:
    """Everything of `model` that loading or post-processing writes, by a name that is the same in equal models."""
    found: dict[str, Holding] = {}
    for name, module in modules_by_name(model).items():
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + key] = Holding(module, "_parameters", key, parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found[prefix + key] = Holding(module, "_buffers", key, buffer)
        for key, value in module.__dict__.items():
            if key not in _NOT_WEIGHTS and isinstance(value, torch.Tensor | FunctionType):
                found[prefix + key] = Holding(module, "__dict__", key, value)
    return found
