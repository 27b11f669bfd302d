"""Memory that bytes of a push land in once, and that workers map.

It is an anonymous memory file (memfd): it has no name anywhere, so nothing is left behind in /dev/shm when a process is
killed (the memory goes with the last process that holds it), and the small /dev/shm of a container does not limit it.
Workers reach it as /proc/PID/fd/FD, which the kernel opens to processes of the same user on the same host alone.

Workers import this module: it needs nothing but the standard library unless an arena is allocated.
"""

import asyncio
import mmap
import os
import weakref
from collections.abc import Callable

from genserve.errors import StagingFullError
from genserve.memory.available import require_memory

_UNMAPPED_AT_ONCE_BYTES = 16 << 20
_COMPARED_AT_ONCE_BYTES = 256 << 10


class Arena:
    """`size_bytes` of memory, made by `allocate`. Use it from one thread at a time."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._mapped: Callable[[], mmap.mmap | None] = _unmapped
        self._writable: mmap.mmap | None = None

    @classmethod
    def allocate(cls, size_bytes: int) -> "Arena":
        """Reserves the memory, all of it now: it takes about a third of a second a GiB, so call it in a thread.

        Raises StagingFullError when the machine or the container has too little.
        """
        try:
            fd = os.memfd_create("genserve-arena", os.MFD_CLOEXEC)
        except OSError as error:
            raise StagingFullError(f"no memory can be had for the push: {error.strerror}") from error
        try:
            os.fchmod(fd, 0o600)
            _reserve(fd, 0, size_bytes)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise StagingFullError(f"{size_bytes} bytes of memory could not be mapped: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def extend(self, size_bytes: int) -> None:
        """Makes it larger; what is there stays. Takes as long as `allocate`. Raises StagingFullError."""
        self._check(0, 0)
        more_bytes = size_bytes - self._size_bytes
        if more_bytes > 0:
            _reserve(self._fd, self._size_bytes, more_bytes)
            self._size_bytes = size_bytes
            self._mapped = _unmapped
            self._writable = None

    @property
    def path(self) -> str:
        """Where workers find it, for `map_arena`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self._size_bytes

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._fd == -1

    @property
    def viewed(self) -> bool:
        """Whether somebody still has a view of it."""
        return self._mapped() is not None

    def target(self, offset: int, length: int) -> memoryview:
        """The bytes at `offset`, to be written, also by threads: the view keeps the memory alive when the arena is
        closed meanwhile. Raises ValueError outside of the arena, StagingFullError when it cannot be mapped."""
        self._check(offset, length)
        if length == 0:
            return memoryview(bytearray())
        if self._writable is None:
            # Kept, and with it the tables of its pages: to write to a page that is mapped takes a third of the time of
            # pwrite, to write to one that is not takes as long.
            try:
                self._writable = mmap.mmap(self._fd, self._size_bytes)
            except OSError as error:
                raise StagingFullError(f"{self._size_bytes} bytes could not be mapped: {error.strerror}") from error
        return memoryview(self._writable)[offset : offset + length]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies `data` to `offset`; releases the GIL meanwhile. Raises as `target`."""
        # Only who writes needs numpy.
        import numpy as np

        target = self.target(offset, len(data))
        if target:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))

    def equals(self, offset: int, data: bytes | memoryview) -> bool:
        """Whether these bytes lie at `offset`. Raises ValueError outside of the arena."""
        self._check(offset, len(data))
        rest = memoryview(data)
        while rest:
            there = os.pread(self._fd, min(len(rest), _COMPARED_AT_ONCE_BYTES), offset)
            if there != rest[: len(there)]:
                return False
            offset, rest = offset + len(there), rest[len(there) :]
        return True

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes at `offset`, read-only and not copied; they keep the memory alive. Raises ValueError outside."""
        self._check(offset, length)
        if length == 0:
            return memoryview(b"")
        mapped = self._mapped()
        if mapped is None:
            mapped = mmap.mmap(self._fd, self._size_bytes, prot=mmap.PROT_READ)
            # It is given back with the last view of it: none can ever dangle, and nothing is mapped without need.
            self._mapped = weakref.ref(mapped)
        return memoryview(mapped)[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back, as soon as no worker maps it and no view is left. Safe to call more than once.

        It takes about 0.2 s a GiB: call it in a thread.
        """
        if self._fd == -1:
            return
        fd, self._fd = self._fd, -1
        # To unmap takes a third of the time, with Python's lock held: piece by piece others get their turn. The kernel
        # frees the pages with the last reference, which is the descriptor; that needs no lock.
        for mapped in filter(None, (self._mapped(), self._writable)):
            for start in range(0, self._size_bytes, _UNMAPPED_AT_ONCE_BYTES):
                mapped.madvise(mmap.MADV_DONTNEED, start, min(_UNMAPPED_AT_ONCE_BYTES, self._size_bytes - start))
            del mapped
        self._mapped, self._writable = _unmapped, None
        os.close(fd)

    def _check(self, offset: int, length: int) -> None:
        if self.closed:
            raise ValueError("the arena is closed")
        if not 0 <= offset <= offset + length <= self._size_bytes:
            raise ValueError(f"[{offset}, {offset + length}) lies outside of an arena of {self._size_bytes} bytes")


def _unmapped() -> None:
    """What a weak reference to no map gives."""


async def allocate_arena(size_bytes: int) -> Arena:
    """`Arena.allocate` in a thread; when cancelled, what the thread still brings is given back at once."""
    allocating = asyncio.ensure_future(asyncio.to_thread(Arena.allocate, size_bytes))
    try:
        return await asyncio.shield(allocating)
    except asyncio.CancelledError:
        allocating.add_done_callback(_close_result)
        raise


def _close_result(done: "asyncio.Future[Arena]") -> None:
    """In a thread: to give a GiB back takes long enough for token streams to notice."""
    if not done.cancelled() and done.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, done.result().close)


def _reserve(fd: int, offset: int, size_bytes: int) -> None:
    """Takes the memory now: otherwise pages would be found when they are first written, and a lack of memory would be a
    SIGBUS. Raises StagingFullError."""
    require_memory(size_bytes)
    try:
        if size_bytes:
            os.posix_fallocate(fd, offset, size_bytes)
    except OSError as error:
        raise StagingFullError(f"{size_bytes} bytes of memory could not be reserved: {error.strerror}") from error


def map_arena(path: str, size_bytes: int) -> mmap.mmap:
    """An arena of another process, read-only. It stays valid after its owner has closed it or died.

    Raises OSError when the owner is gone or belongs to another user, ValueError when the arena is smaller.
    """
    if size_bytes == 0:
        return mmap.mmap(-1, 1, prot=mmap.PROT_READ)  # nothing can be mapped from an empty file
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
