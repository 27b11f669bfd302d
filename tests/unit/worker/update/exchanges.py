"""Models whose weights are exchanged, without vLLM."""

from collections.abc import Mapping

import torch
from torch import nn

from genserve.worker.model.tree import holdings
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import Buffer, ContentExchange, PointerExchange, exchange

CPU = Device(torch.device("cpu"))


class Plain(nn.Module):
    """A layer whose weights are all tensors: a norm and its tie, a fused weight with a view of a part, and what is
    derived."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full((4,), value))
        self.head = self.norm
        self.fused = nn.Parameter(torch.full((6, 2), value))
        self.register_buffer("part", self.fused.data[2:4])
        self.register_buffer("scale", torch.tensor(value))
        self.derived = torch.full((3, 2), value).t()

    def seen(self) -> set[float]:
        """Every value that the layer computes with."""
        tensors = [self.norm, self.head, self.fused, self.part, self.scale, self.derived]
        return {float(value) for tensor in tensors for value in tensor.reshape(-1)}


def exchange_of(live: nn.Module, prepared: nn.Module, device: Device = CPU) -> PointerExchange | ContentExchange:
    """A prepared version of small modules."""
    return exchange(holdings(live), holdings(prepared), device, Buffer(holdings(live), device))


def addresses(module: nn.Module) -> Mapping[str, int]:
    """Where the tensors of a module lie."""
    return {name: place.value.data_ptr() for name, place in holdings(module).items()}
