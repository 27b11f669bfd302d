"""Shared memory that receives the bytes of a push, and that workers map; and how many bytes have arrived, for workers
that begin with its first tensors.

It is an anonymous memory file (memfd). It has no name, so nothing is left in /dev/shm when a process is killed (the
memory is freed with the last process that holds it), and the small /dev/shm of a container does not limit it. Workers
open it as /proc/PID/fd/FD, which the kernel allows only processes of the same user on the same host.

The number of bytes that have arrived is the size of another such file, which nobody writes to: it takes no memory, and
the kernel reads and changes it as a whole.

Workers import this module: it needs only the standard library unless an arena is allocated.
"""

import asyncio
import mmap
import os
import threading
import weakref

from genserve.errors import StagingFullError
from genserve.memory.available import require_memory

_UNMAPPED_AT_ONCE_BYTES = 16 << 20
_COMPARED_AT_ONCE_BYTES = 256 << 10


class Arena:
    """`size_bytes` of memory, made by `allocate`. Write to it from one thread at a time. Any thread may view and close
    it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        """The path for `map_arena` in a worker; "" once it is closed."""
        # The descriptor is not closed between its check and its use: its number may be that of another file then.
        self._using = threading.Lock()
        self.size_bytes = size_bytes
        self._mapped: weakref.ref[mmap.mmap] | None = None
        self._writable: mmap.mmap | None = None

    @classmethod
    def allocate(cls, size_bytes: int) -> "Arena":
        """Reserves all of the memory now. This takes about a third of a second per GiB, so call it in a thread. Raises
        StagingFullError if the machine or the container has too little."""
        try:
            fd = os.memfd_create("genserve-arena", os.MFD_CLOEXEC)
        except OSError as error:
            raise StagingFullError(f"no memory is available for the push: {error.strerror}") from error
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
        """Makes it larger and keeps its bytes. Takes as long as `allocate`. Raises StagingFullError."""
        self._check(0, 0)
        more_bytes = size_bytes - self.size_bytes
        if more_bytes > 0:
            _reserve(self._fd, self.size_bytes, more_bytes)
            with self._using:
                self.size_bytes = size_bytes
                self._mapped = None
                self._writable = None

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._fd == -1

    @property
    def viewed(self) -> bool:
        """Whether a view of it exists."""
        return self._mapped is not None and self._mapped() is not None

    def target(self, offset: int, length: int) -> memoryview:
        """The bytes at `offset` for writing, also by threads: the view keeps the memory alive if the arena is closed
        meanwhile. Raises ValueError outside of the arena, StagingFullError if it cannot be mapped."""
        with self._using:
            if self._fd == -1 or not 0 <= offset <= offset + length <= self.size_bytes:
                raise self._refused(offset, length)
            if length == 0:
                return memoryview(bytearray())
            if self._writable is None:
                # Kept with its page tables: a write to a mapped page takes a third of the time of pwrite, a write to an
                # unmapped page takes as long as pwrite.
                try:
                    self._writable = mmap.mmap(self._fd, self.size_bytes)
                except OSError as error:
                    raise StagingFullError(f"{self.size_bytes} bytes could not be mapped: {error.strerror}") from error
            return memoryview(self._writable)[offset : offset + length]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies `data` to `offset`; releases the GIL meanwhile. Raises as `target`."""
        # Only writers need numpy.
        import numpy as np

        target = self.target(offset, len(data))
        if target:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))

    def equals(self, offset: int, data: bytes | memoryview) -> bool:
        """Whether these bytes are at `offset`. Raises ValueError outside of the arena."""
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
        with self._using:
            self._check(offset, length)
            if length == 0:
                return memoryview(b"")
            mapped = None if self._mapped is None else self._mapped()
            if mapped is None:
                mapped = mmap.mmap(self._fd, self.size_bytes, prot=mmap.PROT_READ)
                # Unmapped with its last view: no view can dangle, and nothing is mapped without need.
                self._mapped = weakref.ref(mapped)
            return memoryview(mapped)[offset : offset + length]

    def window(self, offset: int, length: int) -> memoryview:
        """As `view`, in a map of its own, for a thread that reads one part after the other: what others view at the
        time would keep every part mapped, and unmapping them all at once holds Python's global lock for long."""
        with self._using:
            self._check(offset, length)
            if length == 0:
                return memoryview(b"")
            before = offset % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(self._fd, before + length, prot=mmap.PROT_READ, offset=offset - before)
            return memoryview(mapped)[before:]

    def close(self) -> None:
        """Frees the memory as soon as no worker maps it and no view is left. Safe to call more than once. It takes
        about 0.2 s per GiB, so call it in a thread."""
        with self._using:
            if self._fd == -1:
                return
            fd, self._fd, self.path = self._fd, -1, ""
            maps = [None if self._mapped is None else self._mapped(), self._writable]
            self._mapped, self._writable = None, None
        # Unmapping takes a third of the time and holds Python's global lock: in pieces, other threads get their turn.
        # The kernel frees the pages with the last reference, which is the descriptor; this does not need the lock.
        while maps:
            if (mapped := maps.pop()) is None:
                continue
            for start in range(0, self.size_bytes, _UNMAPPED_AT_ONCE_BYTES):
                mapped.madvise(mmap.MADV_DONTNEED, start, min(_UNMAPPED_AT_ONCE_BYTES, self.size_bytes - start))
            del mapped
        os.close(fd)

    def _check(self, offset: int, length: int) -> None:
        if self._fd == -1 or not 0 <= offset <= offset + length <= self.size_bytes:
            raise self._refused(offset, length)

    def _refused(self, offset: int, length: int) -> ValueError:
        if self._fd == -1:
            return ValueError("the arena is closed")
        return ValueError(f"[{offset}, {offset + length}) lies outside of an arena of {self.size_bytes} bytes")


async def allocate_arena(size_bytes: int) -> Arena:
    """`Arena.allocate` in a thread. If it is cancelled, the memory is freed when the thread ends."""
    allocating = asyncio.ensure_future(asyncio.to_thread(Arena.allocate, size_bytes))
    try:
        return await asyncio.shield(allocating)
    except asyncio.CancelledError:
        allocating.add_done_callback(_close_result)
        raise


def _close_result(done: "asyncio.Future[Arena]") -> None:
    """Closes in a thread: freeing a GiB would delay token streams."""
    if not done.cancelled() and done.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, done.result().close)


def _reserve(fd: int, offset: int, size_bytes: int) -> None:
    """Takes the memory now: otherwise pages would be allocated at their first write, and a lack of memory would be a
    SIGBUS. Raises StagingFullError."""
    require_memory(size_bytes)
    try:
        if size_bytes:
            os.posix_fallocate(fd, offset, size_bytes)
    except OSError as error:
        raise StagingFullError(f"{size_bytes} bytes of memory could not be reserved: {error.strerror}") from error


def map_arena(path: str, size_bytes: int) -> mmap.mmap:
    """Maps an arena of another process, read-only. It stays valid after its owner has closed it or died.

    Raises OSError if the owner is gone or belongs to another user, ValueError if the arena is smaller.
    """
    if size_bytes == 0:
        return mmap.mmap(-1, 1, prot=mmap.PROT_READ)  # an empty file cannot be mapped
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


class Arrival:
    """How many bytes of an arena have arrived: the daemon's side. Made with 0 bytes."""

    def __init__(self) -> None:
        """Raises OSError if the process has too many files open."""
        self._fd = os.memfd_create("genserve-arrival", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """The path for `ArrivedBytes` in a worker."""

    def tell(self, num_bytes: int) -> None:
        """Records that so many bytes have arrived, from the first one on without a gap."""
        if self._fd != -1:
            os.ftruncate(self._fd, num_bytes)

    def close(self) -> None:
        """Safe to call more than once; workers that have opened it keep the last number."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


class ArrivedBytes:
    """A worker's side, open for the length of a block."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the daemon has closed it."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_bytes(self) -> int:
        """How many have arrived, without a gap."""
        return os.fstat(self._fd).st_size

    def __enter__(self) -> "ArrivedBytes":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
