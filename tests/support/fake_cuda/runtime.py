"""The fake runtime of this process, for tests: its complaints, the allocations that it refuses, and raw copies."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_MOST_BYTES = 1 << 16
_DEFAULT = 4  # cudaMemcpyDefault


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcudart.so.13")
    library.fake_cuda_fail_after.argtypes = [ctypes.c_int64]
    library.fake_cuda_take_complaints.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library


def is_here() -> bool:
    """Whether CUDA is fake in this process."""
    try:
        return hasattr(ctypes.CDLL("libcudart.so.13"), "fake_cuda_collect")
    except OSError:
        return False


@contextmanager
def collected() -> Iterator[list[str]]:
    """Complaints within the block do not end the process: they are in the list when the block has ended. May be
    nested."""
    complaints: list[str] = []
    take_complaints()
    was_collecting = _library().fake_cuda_collect(1)
    try:
        yield complaints
    finally:
        _library().fake_cuda_collect(was_collecting)
        complaints += take_complaints()


def take_complaints() -> list[str]:
    """Those since the last call."""
    text = ctypes.create_string_buffer(_MOST_BYTES)
    _library().fake_cuda_take_complaints(text, _MOST_BYTES)
    return text.value.decode().splitlines()


@contextmanager
def failing_after(count: int) -> Iterator[None]:
    """Within the block so many allocations of a device succeed, and the ones after them do not."""
    _library().fake_cuda_fail_after(count)
    try:
        yield
    finally:
        _library().fake_cuda_fail_after(-1)


@contextmanager
def without_allocations() -> Iterator[None]:
    """Within the block each allocation of a device, and each pinning of host memory, is a complaint."""
    _library().fake_cuda_ban_allocations(1)
    try:
        yield
    finally:
        _library().fake_cuda_ban_allocations(0)


def copy(to: int, source: int, size: int) -> int:
    """A copy between addresses, complete when it returns; CUDA's error."""
    arguments = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), _DEFAULT
    error = int(_library().cudaMemcpy(*arguments))
    _library().cudaGetLastError()  # torch would report it at its next call
    return error


def copy_later(to: int, source: int, size: int) -> int:
    """A copy between addresses in the default stream; CUDA's error."""
    arguments = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), _DEFAULT, ctypes.c_void_p(None)
    return int(_library().cudaMemcpyAsync(*arguments))


def pin(size: int) -> int:
    """The address of pinned memory."""
    address = ctypes.c_void_p()
    if _library().cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), 0) != 0 or address.value is None:
        raise MemoryError("the fake driver refuses to pin memory")
    return address.value


def unpin(address: int) -> int:
    """Frees it; CUDA's error."""
    return int(_library().cudaFreeHost(ctypes.c_void_p(address)))
