"""Digests of the weights that the model really uses.

vLLM's own checksums read named parameters, which on the CPU are empty once a linear layer is packed. A packed weight
outside of torch is read back by multiplying it with the identity. Products with one and sums of zeros are exact, so the
result is the weight. int8 weights are scaled in the result, but two different weights still give two results. Weights
that are packed into tensors, such as experts and 4-bit weights, are read directly: packing is deterministic, so equal
weights have equal bytes. Tensors that only `references` finds are read as well, because a digest must show what an
exchange would miss.

All of them take seconds to read, in which steps must go on: so they are read a part at a time.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Iterator
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from genserve.worker.model.audit import hidden
from genserve.worker.model.contents import blocks
from genserve.worker.model.tree import holdings, modules_by_name

Digesting: TypeAlias = Generator[None, None, dict[str, str]]
"""Reads a few MiB between one stop and the next, and returns the SHA-256 (hex) of each tensor, by name."""

_BLOCK_ROWS = 64
_WIDTH_ATTRIBUTES = ("input_size_per_partition", "input_size", "embedding_dim")


class DigestReader:
    """The digests of weights that serve: read a part at a time, and known until `forget` says that they change. Nothing
    of a version that was replaced is held."""

    def __init__(self, begin: Callable[[], Digesting]) -> None:
        self._begin = begin
        self._reading: Digesting | None = None
        self._known: dict[str, str] | None = None

    def read_on(self, budget_s: float) -> dict[str, str] | None:
        """Reads for these seconds and a moment more; the digests, or None if something is left to read. Raises as
        `digesting`."""
        if self._known is not None:
            return self._known
        until_s = time.perf_counter() + budget_s
        reading, self._reading = self._reading or self._begin(), None
        try:
            with torch.no_grad():
                next(reading)
                while time.perf_counter() < until_s:
                    next(reading)
        except StopIteration as end:
            self._known = end.value
        else:
            self._reading = reading
        return self._known

    def forget(self) -> None:
        """The weights are about to change."""
        self._reading = self._known = None


def weight_digests(model: nn.Module, constants: Collection[str] = ()) -> dict[str, str]:
    """`digesting` at once."""
    return whole(digesting(model, constants))


def whole(reading: Digesting) -> dict[str, str]:
    """All of it at once."""
    found = DigestReader(lambda: reading).read_on(float("inf"))
    return {} if found is None else found


def digesting(model: nn.Module, constants: Collection[str] = ()) -> Digesting:
    """Reads every weight of `model`. `constants`: paths of tensors that an audit found not to be weights. Raises
    RuntimeError for a packed weight that it cannot read."""
    digests: dict[str, str] = {}
    modules, places = modules_by_name(model), holdings(model)
    references = list(hidden(model, copied=True, present=places))  # at once: a step may change what it walks through
    for name, place in places.items():
        if isinstance(place.value, torch.Tensor):
            if place.value.numel() == 0:
                continue  # what a packed layer leaves of its weight, which is read at another place
            digests[name] = yield from _digest(blocks(place.value))
        elif place.key == "cpu_linear" or not isinstance(place.value, FunctionType | float):
            digests[name] = yield from _digest(_unpacked(name, _layer_of(name, modules)))
    for reference in references:
        if reference.path not in constants and not reference.tensor.is_inference():
            digests[reference.path] = yield from _digest(blocks(reference.tensor))
    return digests


def _digest(contents: Iterator[Any]) -> Generator[None, None, str]:
    found = hashlib.sha256()
    for block in contents:
        found.update(block)
        yield
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _layer_of(name: str, modules: dict[str, nn.Module]) -> Any:
    while name not in modules:
        name = name.rpartition(".")[0]
    return modules[name]


def _unpacked(name: str, layer: Any) -> Iterator[Any]:
    width = next((getattr(layer, key) for key in _WIDTH_ATTRIBUTES if hasattr(layer, key)), None)
    if width is None:
        raise RuntimeError(f"{name}: the width of this packed layer is not known")
    dtype = layer.weight.dtype if layer.weight is not None else layer.params_dtype
    # Inputs are quantised on the way in; with a fixed scale, one could be too small to become anything but zero.
    scale = getattr(layer, "input_scale", None)
    one = 1.0 if scale is None else 127 * float(scale)
    for start in range(0, width, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, width - start)
        identity = torch.zeros(rows, width, dtype=dtype)
        identity[torch.arange(rows), start + torch.arange(rows)] = one
        if hasattr(layer, "cpu_linear"):
            product = layer.cpu_linear(identity, layer.weight, None)
        else:
            product = layer.quant_method.apply(layer, identity, None)
        yield _bytes(product)
