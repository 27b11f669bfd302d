"""Copies a trainer's shared memory into a push, in threads."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from genserve.errors import InvalidFieldError
from genserve.weights.segment import Segment, SegmentChunk
from genserve.weights.stream import PushStream
from genserve.weights.taken_pipe import TakenPipe

P = ParamSpec("P")
T = TypeVar("T")

_WRITTEN_AT_ONCE_BYTES = 1 << 20


class SegmentReader:
    """What one stream hands over: any memory that `Segment` opens, or that at `only_path` alone. Keeps what was named
    last open."""

    def __init__(self, only_path: str | None = None) -> None:
        self._only_path = only_path
        self._segment: Segment | None = None
        self._pipe: TakenPipe | None = None

    async def take(self, stream: PushStream, chunk: SegmentChunk) -> None:
        """Stages a piece of shared memory, and tells its owner if it wants to know. Raises InvalidFieldError for memory
        or a pipe that may not be used, and as `PushStream.write`; none of them changes anything."""
        segment, pipe = self._open(chunk.path), self._open_pipe(chunk.taken_path)
        segment.check(chunk)
        while stream.is_claimed(chunk.offset, chunk.length):
            await stream.wait_settled()
        claim = stream.claim(chunk.offset, chunk.length)
        if claim is None:
            await self._compare(stream, segment, chunk)
        else:
            written = False
            try:
                await _to_the_end(segment.copy, chunk, claim.target)
                written = True
            finally:
                stream.settle(claim, written=written)
        if pipe is not None:
            pipe.tell()

    async def _compare(self, stream: PushStream, segment: Segment, chunk: SegmentChunk) -> None:
        """A piece of which bytes are there already, or that need not be there, as if it had come in chunks."""
        data = memoryview(await _to_the_end(segment.read, chunk))
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            piece = data[start : start + _WRITTEN_AT_ONCE_BYTES]
            while stream.is_claimed(chunk.offset + start, len(piece)):
                await stream.wait_settled()
            stream.write(chunk.offset + start, piece, None)
            await asyncio.sleep(0)

    def _open(self, path: str) -> Segment:
        if self._only_path is not None and path != self._only_path:
            raise InvalidFieldError.of("segment", "only a peer on the daemon's own host may hand memory over")
        if self._segment is None or self._segment.path != path:
            self._close_segment()
            self._segment = Segment.open(path)
        return self._segment

    def _open_pipe(self, path: str) -> TakenPipe | None:
        if not path:
            return None
        if self._pipe is None or self._pipe.path != path:
            self._close_pipe()
            self._pipe = TakenPipe.open(path)
        return self._pipe

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def close(self) -> None:
        """Lets go of the memory, and of the pipe."""
        self._close_segment()
        self._close_pipe()


async def _to_the_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs it in a thread. Cancelled, it waits for the thread: descriptors may only be closed when nobody uses them,
    and other bytes may not be written to a place where a thread still writes."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
