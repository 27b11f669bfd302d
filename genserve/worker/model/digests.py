"""Digests of the weights that the model really uses.

vLLM's own checksums read named parameters, which on the CPU are empty once a linear layer is packed. A packed weight
outside of torch is read back by multiplying it with the identity. Products with one and sums of zeros are exact, so the
result is the weight. int8 weights are scaled in the result, but two different weights still give two results. Weights
that are packed into tensors, such as experts and 4-bit weights, are read directly: packing is deterministic, so equal
weights have equal bytes. Tensors that only `references` finds are read as well, because a digest must show what an
exchange would miss.
"""

import hashlib
from collections.abc import Collection
from types import FunctionType
from typing import Any

import torch
from torch import nn

from genserve.worker.model.audit import hidden
from genserve.worker.model.contents import digest as _digest
from genserve.worker.model.tree import holdings, modules_by_name

_BLOCK_ROWS = 256
_WIDTH_ATTRIBUTES = ("input_size_per_partition", "input_size", "embedding_dim")


def weight_digests(model: nn.Module, constants: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 (hex) of every weight of `model`, by name. `constants`: paths of tensors that an audit found not to be
    weights. Raises RuntimeError for a packed weight that it cannot read."""
    digests: dict[str, str] = {}
    modules = modules_by_name(model)
    with torch.no_grad():
        for name, place in holdings(model).items():
            if isinstance(place.value, torch.Tensor):
                digests[name] = _digest(place.value)
            elif place.key == "cpu_linear" or not isinstance(place.value, FunctionType | float):
                digests[name] = _digest_of_packed(name, _layer_of(name, modules))
        for reference in hidden(model, copied=True):
            if reference.path not in constants and not reference.tensor.is_inference():
                digests[reference.path] = _digest(reference.tensor)
    return digests


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _layer_of(name: str, modules: dict[str, nn.Module]) -> Any:
    while name not in modules:
        name = name.rpartition(".")[0]
    return modules[name]


def _digest_of_packed(name: str, layer: Any) -> str:
    width = next((getattr(layer, key) for key in _WIDTH_ATTRIBUTES if hasattr(layer, key)), None)
    if width is None:
        raise RuntimeError(f"{name}: the width of this packed layer is not known")
    dtype = layer.weight.dtype if layer.weight is not None else layer.params_dtype
    # Inputs are quantised on the way in; with a fixed scale, one could be too small to become anything but zero.
    scale = getattr(layer, "input_scale", None)
    one = 1.0 if scale is None else 127 * float(scale)
    digest = hashlib.sha256()
    for start in range(0, width, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, width - start)
        identity = torch.zeros(rows, width, dtype=dtype)
        identity[torch.arange(rows), start + torch.arange(rows)] = one
        if hasattr(layer, "cpu_linear"):
            product = layer.cpu_linear(identity, layer.weight, None)
        else:
            product = layer.quant_method.apply(layer, identity, None)
        digest.update(_bytes(product))
    return digest.hexdigest()
