"""Tensors as views into an arena: no byte is copied before the loader puts it where it belongs."""

import mmap
import warnings
from collections.abc import Iterator

import torch

from genserve.weights.arena import map_arena
from genserve.worker.contract import Prepare

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""safetensors' names of types."""


class ArenaTensors:
    """Every tensor of a push, mapped read-only. On CUDA the pages are locked, so copies to the device run at full speed
    and do not block."""

    def __init__(self, request: Prepare, *, pin: bool) -> None:
        self._tensors = request.tensors
        self._map: mmap.mmap = map_arena(request.arena_path, request.arena_size_bytes)
        self._pinned_at: int | None = None
        if pin and request.arena_size_bytes > 0:
            self._pin(request.arena_size_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape, offset, _ in self._tensors:
            yield name, self._view(TORCH_DTYPES[dtype], shape, offset)

    def _view(self, dtype: torch.dtype, shape: object, offset: int) -> torch.Tensor:
        size = torch.Size(shape)
        if size.numel() == 0:
            return torch.empty(size, dtype=dtype)
        with warnings.catch_warnings():
            # The map is read-only and torch has no read-only tensors; loaders only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=size.numel(), offset=offset).view(size)

    def _pin(self, size_bytes: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        read_only = 0x08  # cudaHostRegisterReadOnly
        cudart = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(address, size_bytes, read_only)) == 0:
            self._pinned_at = address

    def close(self) -> None:
        """Unlocks the pages. The map itself goes with the last tensor that views it."""
        if self._pinned_at is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)
            self._pinned_at = None
