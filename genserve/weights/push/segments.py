"""What a stream of a push hands over in shared memory: which memory is open, and what of it is copied or compared."""

import asyncio
from dataclasses import dataclass

from genserve.errors import InvalidFieldError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.segment import Segment, SegmentChunk
from genserve.weights.push.copies import CopyQueue
from genserve.weights.push.stream import PushStream

_WRITTEN_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OwnRing:
    """The memory of a process of the daemon's, and the pipe on which it gets acknowledgements."""

    path: str
    ack_path: str


class SegmentReader:
    """What one stream hands over: any memory that `Segment` opens and no process of the `daemon` has open; or `own`,
    which is of such a process, and no other. Keeps what was named last open.

    Pieces are copied in their order by a thread, which acknowledges them too: while it is at one, the event loop
    takes the frame of the next. Use the rest on the event loop, and `close` at the end in any case.
    """

    def __init__(self, daemon: DaemonProcesses, own: OwnRing | None = None) -> None:
        self._own = own
        self._others = daemon if own is None else None
        self._segment: Segment | None = None
        self._pipe: AckPipe | None = None
        self._copies = CopyQueue()

    async def take(self, stream: PushStream, chunk: SegmentChunk) -> None:
        """Starts to stage a piece of shared memory.

        Raises InvalidFieldError for memory or a pipe that may not be used, and as `PushStream.write`, for this piece or
        an earlier one; these errors change nothing.
        """
        await self._copies.wait_room()
        segment, pipe = await self._open(chunk.path), await self._open_pipe(chunk)
        segment.check(chunk)
        await stream.wait_unclaimed(chunk.offset, chunk.length)
        claim = stream.claim(chunk.offset, chunk.length)
        if claim is not None:
            self._copies.put(stream, claim, chunk, segment, pipe)
            return
        await self.finish()
        await self._compare(stream, segment, chunk)
        if pipe is not None:
            pipe.acknowledge()

    async def finish(self) -> None:
        """Waits until every piece was copied. Raises as `take`."""
        await self._copies.wait_empty()

    async def close(self) -> None:
        """Closes the memory and the pipe. Pieces that were not copied may be lost."""
        self._copies.cancel()
        # Descriptors may only be closed when nobody uses them, even if the caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._copies.close()
        self._close_segment()
        self._close_pipe()

    async def _compare(self, stream: PushStream, segment: Segment, chunk: SegmentChunk) -> None:
        """Writes a piece as a chunk, if some of its bytes are there already or are not needed."""
        data = memoryview(await asyncio.to_thread(segment.read, chunk))
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            piece = data[start : start + _WRITTEN_AT_ONCE_BYTES]
            await stream.wait_unclaimed(chunk.offset + start, len(piece))
            stream.write(chunk.offset + start, piece, None)
            await asyncio.sleep(0)

    async def _open(self, path: str) -> Segment:
        if self._own is not None and path != self._own.path:
            raise InvalidFieldError.of("segment", "only a client on the daemon's host may send shared memory")
        if self._segment is None or not self._segment.is_at(path):
            await self.finish()
            self._close_segment()
            self._segment = Segment.open(path, self._others)
        return self._segment

    async def _open_pipe(self, chunk: SegmentChunk) -> AckPipe | None:
        if self._own is not None and chunk.ack_path != self._own.ack_path:
            raise InvalidFieldError.of("segment.taken_path", "is not the pipe that belongs to the memory")
        if not chunk.ack_path:
            return None
        if self._pipe is None or not self._pipe.is_at(chunk.ack_path):
            await self.finish()
            self._close_pipe()
            self._pipe = await AckPipe.open(chunk.ack_path, chunk.path, self._others)
        return self._pipe

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
