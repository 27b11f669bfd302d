"""Tensors as views into an arena: no byte is copied before the loader puts it in its place."""

import mmap
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Event

import torch

from genserve.memory.arena import ArrivedBytes, map_arena
from genserve.tensors.dtypes import FRAMEWORK_NAMES, item_bytes
from genserve.worker.contract.calls import Prepare
from genserve.worker.update.protocol import PrepareCancelledError

_FIRST_POLL_S = 0.001
_MAX_POLL_INTERVAL_S = 0.01


class ArenaTensors:
    """Every tensor of a push, mapped read-only. The mapping ends with the last tensor that views it.

    A tensor whose bytes are still arriving is waited for, within `waiting`, until `cancelled` is set: then iterating
    raises PrepareCancelledError.
    """

    def __init__(
        self, request: Prepare, path: str, cancelled: Event, waiting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """`path` is the arena's on this host. Raises DtypeError for a tensor of a type that is not known."""
        for name, dtype, *_ in request.tensors:
            item_bytes(name, dtype)
        self._tensors = request.tensors
        self._arrival_path = request.arrival_path
        self._cancelled = cancelled
        self._waiting = waiting
        self._map: mmap.mmap = map_arena(path, request.arena_size_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._arrival_path:
            for name, dtype, shape, offset, _ in self._tensors:
                yield name, self._view(dtype, shape, offset)
            return
        with ArrivedBytes(self._arrival_path) as arrived:
            num_bytes = 0
            for name, dtype, shape, offset, length in self._tensors:
                if num_bytes < offset + length:
                    num_bytes = self._wait_for(arrived, offset + length)
                yield name, self._view(dtype, shape, offset)

    def _wait_for(self, arrived: ArrivedBytes, end: int) -> int:
        """Waits until the bytes before `end` are there. Returns how many are there."""
        if (num_bytes := arrived.num_bytes) >= end:
            return num_bytes
        interval_s = _FIRST_POLL_S
        with self._waiting():
            while (num_bytes := arrived.num_bytes) < end:
                if self._cancelled.wait(interval_s):
                    raise PrepareCancelledError
                interval_s = min(1.5 * interval_s, _MAX_POLL_INTERVAL_S)
        return num_bytes

    def _view(self, dtype: str, shape: object, offset: int) -> torch.Tensor:
        size = torch.Size(shape)
        kind = getattr(torch, FRAMEWORK_NAMES[dtype])
        if size.numel() == 0:
            return torch.empty(size, dtype=kind)
        with warnings.catch_warnings():
            # The mapping is read-only and torch has no read-only tensors; loaders only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=kind, count=size.numel(), offset=offset).view(size)
