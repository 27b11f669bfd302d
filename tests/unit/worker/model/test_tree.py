"""What counts as a place that holds weights, and what hangs on layers."""

from typing import Any

import torch
from torch import nn

from genserve.worker.model.tree import holdings
from genserve.worker.update.exchange import PointerExchange, matched


class Kernel:
    """Stands for an object of vLLM's that post-processing writes to."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self, value: float, layer: nn.Module) -> None:
        self.layer = layer
        self.scale = value
        self.packed = torch.full((2,), value)
        self.weight = layer.weight


class Handler:
    """Stands for memory outside of torch."""

    __module__ = "vllm._custom_ops"

    def __del__(self) -> None:
        pass


def layer_with_kernel(value: float) -> Any:
    """A linear with a kernel, as quantised ones have; the kernel refers back, and to the weight."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(value)
    kernel = Kernel(value, layer)
    kernel.__dict__["handler"] = Handler()
    layer.__dict__["kernel"] = kernel
    return nn.Sequential(layer)


def test_objects_on_layers_are_searched_and_no_reference_is_reported_twice() -> None:
    """By a path that equal models share."""
    assert holdings(layer_with_kernel(1.0)).keys() == {
        "0.weight",
        "0.kernel.scale",
        "0.kernel.packed",
        "0.kernel.handler",
    }


def test_what_hangs_on_layers_is_exchanged_and_put_back() -> None:
    """Numbers, tensors and foreign memory; the object itself stays, and its reference to the weight is still good."""
    live, prepared = layer_with_kernel(1.0), layer_with_kernel(2.0)
    kernel, handler, new = live[0].kernel, live[0].kernel.handler, prepared[0].kernel.handler
    exchange = PointerExchange(matched(holdings(live), holdings(prepared)))
    exchange.commit()
    assert live[0].kernel is kernel
    assert (kernel.scale, float(kernel.packed[0]), float(kernel.weight[0, 0])) == (2.0, 2.0, 2.0)
    assert kernel.handler is new
    exchange.rollback()
    assert (kernel.scale, float(kernel.packed[0]), float(kernel.weight[0, 0])) == (1.0, 1.0, 1.0)
    assert kernel.handler is handler
