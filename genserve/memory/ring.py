"""A ring buffer in shared memory: a process writes pieces, and the daemon on its host copies and acknowledges them."""

import asyncio
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# A smaller push would be over before the daemon has said whether it can read shared memory.
MIN_BYTES: Final = 8 << 20
PIECE_BYTES: Final = 4 << 20
NUM_PIECES: Final = 4  # all of them stay in a processor's cache, so that the daemon reads from the cache
NAME_PREFIX: Final = "genserve-push"
"""Prefix of the name of each memory that the daemon opens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + length) of the memory at `path`. The reader acknowledges them by a byte to the pipe at
    `ack_path`."""

    path: str
    start: int
    length: int
    ack_path: str


class SharedRing:
    """Anonymous memory, and a pipe on which the daemon acknowledges each piece that it has copied. For one stream at a
    time."""

    def __init__(self) -> None:
        """Needs Linux. Raises OSError if the kernel refuses."""
        import fcntl  # Windows lacks it, and the client imports this module there, too

        fd = os.memfd_create(NAME_PREFIX, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._fds = [fd]
        self._close = weakref.finalize(self, _close_all, self._fds)  # also when a client is dropped and never closed
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, NUM_PIECES * PIECE_BYTES)
        # The daemon maps memory that cannot be shortened.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = memoryview(mmap.mmap(fd, NUM_PIECES * PIECE_BYTES))
        self._acks, written_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._fds += [self._acks, written_end]
        self.path, self.ack_path = (f"/proc/{os.getpid()}/fd/{each}" for each in (fd, written_end))
        self._num_put = self._num_acknowledged = 0

    async def put(self, parts: Sequence[bytes | memoryview]) -> Piece:
        """Writes `parts`, at most PIECE_BYTES, to the oldest place once the daemon has copied its bytes."""
        while self._num_put - self._num_acknowledged == NUM_PIECES:
            await self._read_acks()
        start = position = self._num_put % NUM_PIECES * PIECE_BYTES
        for part in parts:
            self._memory[position : position + len(part)] = part
            position += len(part)
        self._num_put += 1
        return Piece(self.path, start, position - start, self.ack_path)

    async def _read_acks(self) -> None:
        try:
            self._num_acknowledged += len(os.read(self._acks, NUM_PIECES))
        except BlockingIOError:
            await _readable(self._acks)

    def close(self) -> None:
        """Frees the memory. Safe to call more than once."""
        self._memory.release()
        self._close()


class SpareRings:
    """Rings that are kept between pushes."""

    def __init__(self) -> None:
        self._spare: list[SharedRing] = []

    def take(self) -> SharedRing:
        """A ring for the caller. Raises OSError if the kernel refuses."""
        return self._spare.pop() if self._spare else SharedRing()

    def give_back(self, ring: SharedRing) -> None:
        """Returns a ring that no daemon reads any more: its push was answered with success."""
        self._spare.append(ring)

    def close(self) -> None:
        """Frees the memory."""
        while self._spare:
            self._spare.pop().close()


async def _readable(fd: int) -> None:
    """Waits until the descriptor is readable."""
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(fd)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
