"""Digests of the weights that are really used.

vLLM's own checksums read named parameters, which on the CPU are empty once a linear is packed. A packed linear is read
back by multiplying the identity with it: products with one and sums of zeros are exact, so the result is the weight.
"""

import hashlib
from types import FunctionType
from typing import Any

import torch
from torch import nn

from genserve.worker.tree import holdings

_BLOCK_ROWS = 256


def weight_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 (hex) of every weight of `model`, by name. Raises RuntimeError for a packed weight it cannot read."""
    digests: dict[str, str] = {}
    with torch.no_grad():
        for name, place in holdings(model).items():
            if isinstance(place.value, torch.Tensor):
                digests[name] = _digest(place.value.detach())
            elif place.key == "cpu_linear" and isinstance(place.value, FunctionType):
                digests[name] = _digest_of_packed(name, place.module)
    return digests


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _digest_of_packed(name: str, layer: nn.Module) -> str:
    width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None)
    if width is None:
        raise RuntimeError(f"{name}: the width of this packed layer is not known")
    weight: torch.Tensor = layer.weight
    digest = hashlib.sha256()
    for start in range(0, width, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, width - start)
        identity = torch.zeros(rows, width, dtype=weight.dtype)
        identity[torch.arange(rows), start + torch.arange(rows)] = 1
        digest.update(_bytes(layer.cpu_linear(identity, weight, None)))
    return digest.hexdigest()
