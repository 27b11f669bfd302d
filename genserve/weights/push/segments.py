"""What a stream of a push hands over in shared memory: which memory is open, and what of it is copied or compared."""

import asyncio

from genserve.errors import InvalidFieldError
from genserve.memory.ack_pipe import TakenPipe
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.segment import Segment, SegmentChunk
from genserve.weights.push.copies import CopyQueue
from genserve.weights.push.stream import PushStream

_WRITTEN_AT_ONCE_BYTES = 1 << 20


class SegmentReader:
    """What one stream hands over: any memory that `Segment` opens, or that at `only_path` alone, which is of a process
    of the daemon's. Keeps what was named last open.

    Pieces are copied by a thread, which tells their owner too: while it is at one, the event loop takes the frame of
    the next. Use it on the event loop, and `close` at the end in any case.
    """

    def __init__(self, daemon: DaemonProcesses, only_path: str | None = None) -> None:
        self._daemon = daemon
        self._only_path = only_path
        self._segment: Segment | None = None
        self._pipe: TakenPipe | None = None
        self._copies = CopyQueue()

    async def take(self, stream: PushStream, chunk: SegmentChunk) -> None:
        """Stages a piece of shared memory, soon. Raises InvalidFieldError for memory or a pipe that may not be used,
        and as `PushStream.write`, for this piece or one before; none of them changes anything."""
        await self._copies.wait_room()
        segment, pipe = await self._open(chunk.path), await self._open_pipe(chunk)
        segment.check(chunk)
        while stream.is_claimed(chunk.offset, chunk.length):
            await stream.wait_settled()
        claim = stream.claim(chunk.offset, chunk.length)
        if claim is not None:
            self._copies.put(stream, claim, chunk, segment, pipe)
            return
        await self.finish()
        await self._compare(stream, segment, chunk)
        if pipe is not None:
            pipe.tell()

    async def finish(self) -> None:
        """Returns when every piece is there. Raises as `take`."""
        await self._copies.wait_empty()

    async def close(self) -> None:
        """Lets go of the memory, and of the pipe. Pieces that are not there may not come."""
        self._copies.cancel()
        # Descriptors may only be closed when nobody uses them, whatever becomes of the caller.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._copies.close()
        self._close_segment()
        self._close_pipe()

    async def _compare(self, stream: PushStream, segment: Segment, chunk: SegmentChunk) -> None:
        """A piece of which bytes are there already, or that need not be there, as if it had come in chunks."""
        data = memoryview(await asyncio.to_thread(segment.read, chunk))
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            piece = data[start : start + _WRITTEN_AT_ONCE_BYTES]
            while stream.is_claimed(chunk.offset + start, len(piece)):
                await stream.wait_settled()
            stream.write(chunk.offset + start, piece, None)
            await asyncio.sleep(0)

    async def _open(self, path: str) -> Segment:
        if self._only_path is not None and path != self._only_path:
            raise InvalidFieldError.of("segment", "only a peer on the daemon's own host may hand memory over")
        if self._segment is None or not self._segment.is_at(path):
            await self.finish()
            self._close_segment()
            self._segment = Segment.open(path, self._daemon if self._only_path is None else None)
        return self._segment

    async def _open_pipe(self, chunk: SegmentChunk) -> TakenPipe | None:
        if not chunk.taken_path:
            return None
        if self._pipe is None or not self._pipe.is_at(chunk.taken_path):
            await self.finish()
            self._close_pipe()
            self._pipe = await TakenPipe.open(chunk.taken_path, chunk.path, self._daemon)
        return self._pipe

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
