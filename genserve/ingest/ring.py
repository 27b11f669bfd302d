"""Shared memory that chunks lie in until the daemon has copied them."""

import asyncio
import fcntl
import mmap
import os
from collections import deque

from genserve.memory.segment import NAME_PREFIX
from genserve.v1 import weights_pb2


class ChunkRing:
    """`size_bytes` of memory that are written round and round: one stream's chunks, in the order in which they came."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = os.memfd_create(f"{NAME_PREFIX}-ingest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size_bytes)
        # What cannot be shortened the daemon reads in place.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = memoryview(mmap.mmap(self._fd, size_bytes))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._places: deque[tuple[int, int]] = deque()  # of what has not been copied, oldest first; (0, 0) = elsewhere
        self._freed = asyncio.Event()

    async def put(self, offset: int, data: bytes | memoryview) -> bytes:
        """Writes a chunk of at most `size_bytes`, when there is room, and makes the frame that names it."""
        while (start := self._room(len(data))) is None:
            self._freed.clear()
            await self._freed.wait()
        self._places.append((start, start + len(data)))
        self._memory[start : start + len(data)] = data
        segment = weights_pb2.PushSegment(path=self.path, segment_offset=start, offset=offset, length=len(data))
        return weights_pb2.PushWeightsRequest(segment=segment).SerializeToString()

    def pass_by(self) -> None:
        """A frame is sent that is not in the ring; it will be acknowledged as the others."""
        self._places.append((0, 0))

    def acknowledge(self) -> None:
        """The oldest frame has been taken."""
        self._places.popleft()
        self._freed.set()

    def _room(self, length: int) -> int | None:
        """Where the next chunk can lie."""
        used = [place for place in self._places if place[0] < place[1]]
        if not used:
            return 0
        oldest, newest = used[0][0], used[-1][1]
        if newest > oldest:  # free: behind the newest, and before the oldest
            return newest if newest + length <= self.size_bytes else 0 if length < oldest else None
        return newest if newest + length < oldest else None

    def close(self) -> None:
        """Gives the memory back, once the daemon has closed it too."""
        self._memory.release()
        os.close(self._fd)
