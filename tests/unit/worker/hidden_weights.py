"""Layers that keep a weight where an exchange does not look, each in another way."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


@dataclass
class FlexData:
    """As triton_kernels' InFlexData."""

    scale: torch.Tensor | None = None


@dataclass
class PrecisionConfig:
    """As triton_kernels' PrecisionConfig, where gpt-oss keeps the scales of its MXFP4 weights."""

    weight_scale: torch.Tensor | None = None
    flex_ctx: FlexData = field(default_factory=FlexData)


class Mxfp4Method(QuantizeMethodBase):
    """As vLLM's Mxfp4MoEMethod with Triton: what it makes of the weights lies in dataclasses of another library."""

    def __init__(self) -> None:
        self.w13_precision_config: PrecisionConfig | None = None

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As vLLM's."""
        layer.w13_weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As vLLM's."""
        assert self.w13_precision_config is not None
        return layer.w13_weight * self.w13_precision_config.weight_scale

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As vLLM's."""
        self.w13_precision_config = PrecisionConfig(layer.w13_weight.detach() * 2)


class Slotted:
    """Keeps a tensor in a slot, and leaves another one empty."""

    __slots__ = ("_empty", "weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """Uses it."""
        return x * self.weight


class Plain:
    """A plain object, of no package of vLLM's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def closure(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function over a tensor."""
    return lambda x: x * weight


class Experts(nn.Module):
    """A layer with a parameter that is exchanged, and whatever its `kernel` becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Mxfp4Method()
        self.quant_method.create_weights(self)
        self.kernel: Any = None


def model(layers: int = 2) -> nn.Module:
    """`model.layers.N.mlp.experts`, as vLLM builds it and before anything is loaded."""
    whole = nn.Module()
    whole.model = nn.Module()
    whole.model.layers = nn.ModuleList()
    for _ in range(layers):
        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.experts = Experts()
        whole.model.layers.append(layer)
    return whole


def experts(whole: nn.Module, layer: int = 0) -> Any:
    """A layer of it."""
    return whole.get_submodule(f"model.layers.{layer}.mlp.experts")


HIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "object": (lambda w: Plain(inner=Plain(weight=w)), "kernel.inner.weight"),
    "dataclass": (lambda w: PrecisionConfig(flex_ctx=FlexData(w)), "kernel.flex_ctx.scale"),
    "list": (lambda w: [None, w], "kernel[1]"),
    "dict": (lambda w: {"w1": (w,)}, "kernel['w1'][0]"),
    "set": (lambda w: {w}, "kernel[0]"),
    "slot": (Slotted, "kernel.weight"),
    "bound method": (lambda w: Slotted(w).times, "kernel.__self__.weight"),
    "partial": (lambda w: functools.partial(torch.mul, w), "kernel.args[0]"),
    "partial keyword": (lambda w: functools.partial(torch.mul, other=w), "kernel.keywords['other']"),
    "closure of a partial": (lambda w: functools.partial(closure(w)), "kernel.func.__closure__.weight"),
    "built-in method": (lambda w: w.add, "kernel.__self__"),
    "attribute of a tensor": (lambda w: [_with_scale(w)], "kernel[0].scale"),
    "module that is no child": (lambda w: [_module(w)], "kernel[0].weight"),
}
"""How to hide a weight, and where it is then found."""


def _with_scale(weight: torch.Tensor) -> torch.Tensor:
    holder = torch.empty(0)
    holder.scale = weight  # type: ignore[attr-defined]
    return holder


def _module(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module
