"""Copies a trainer's shared memory into a push, in threads."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from genserve.errors import InvalidFieldError
from genserve.weights.segment import Segment, SegmentChunk
from genserve.weights.stream import PushStream

P = ParamSpec("P")
T = TypeVar("T")

_WRITTEN_AT_ONCE_BYTES = 1 << 20


class SegmentReader:
    """What one stream hands over: any memory that `Segment` opens, or that at `only_path` alone. Keeps the memory that
    was named last open."""

    def __init__(self, only_path: str | None = None) -> None:
        self._only_path = only_path
        self._segment: Segment | None = None

    async def take(self, stream: PushStream, chunk: SegmentChunk) -> None:
        """Stages a piece of shared memory. Raises InvalidFieldError for memory that may not be read or is too short,
        and as `PushStream.write`; none of them changes anything."""
        segment = self._open(chunk.path)
        segment.check(chunk)
        while stream.is_claimed(chunk.offset, chunk.length):
            await stream.wait_settled()
        claim = stream.claim(chunk.offset, chunk.length)
        if claim is None:
            await self._compare(stream, segment, chunk)
            return
        written = False
        try:
            await _to_the_end(segment.copy, chunk, claim.fd)
            written = True
        finally:
            stream.settle(claim, written=written)

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
            self.close()
            self._segment = Segment.open(path)
        return self._segment

    def close(self) -> None:
        """Lets go of the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


async def _to_the_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs it in a thread. Cancelled, it waits for the thread: descriptors may only be closed when nobody uses them,
    and other bytes may not be written to a place where a thread still writes."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
