"""Tensors as views into an arena: no byte is copied before the loader puts it in its place."""

import mmap
import warnings
from collections.abc import Iterator

import torch

from genserve.memory.arena import map_arena
from genserve.tensors.dtypes import FRAMEWORK_NAMES, item_bytes
from genserve.worker.contract.calls import Prepare


class ArenaTensors:
    """Every tensor of a push, mapped read-only. The mapping ends with the last tensor that views it."""

    def __init__(self, request: Prepare, path: str) -> None:
        """`path` is the arena's on this host. Raises DtypeError for a tensor of a type that is not known."""
        for name, dtype, *_ in request.tensors:
            item_bytes(name, dtype)
        self._tensors = request.tensors
        self._map: mmap.mmap = map_arena(path, request.arena_size_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape, offset, _ in self._tensors:
            yield name, self._view(getattr(torch, FRAMEWORK_NAMES[dtype]), shape, offset)

    def _view(self, dtype: torch.dtype, shape: object, offset: int) -> torch.Tensor:
        size = torch.Size(shape)
        if size.numel() == 0:
            return torch.empty(size, dtype=dtype)
        with warnings.catch_warnings():
            # The mapping is read-only and torch has no read-only tensors; loaders only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=size.numel(), offset=offset).view(size)
