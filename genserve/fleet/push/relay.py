"""The frames of a trainer's stream, handed to replicas as they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from genserve.fleet.upstream import Upstream
from genserve.transport.streams import FinalStatus
from genserve.v1 import weights_pb2

_AHEAD: Final = 4
"""Frames that wait for a replica: the trainer's stream is read only as fast as the slowest replica takes it."""


async def relay(
    header: weights_pb2.PushHeader,
    frames: AsyncIterator[bytes],
    heads: Sequence[Upstream],
    is_sent: asyncio.Event,
) -> list[weights_pb2.PushWeightsResponse]:
    """Sends a stream to these replicas, and returns their answers. The first that fails ends it for all: raises its
    GenserveError. Sets `is_sent` when the trainer has sent everything."""
    first = weights_pb2.PushWeightsRequest(header=header).SerializeToString()
    feeds = [_Feed(first) for _ in heads]
    answers = [asyncio.create_task(_push(upstream, feed)) for upstream, feed in zip(heads, feeds, strict=True)]
    reading = asyncio.create_task(_read(frames, feeds, is_sent))
    try:
        # A replica may answer before it was sent everything: a refusal, or what it has already.
        waiting = {reading, *answers}
        while not all(answer.done() for answer in answers):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return [answer.result() for answer in answers]
    finally:
        for task in (reading, *answers):
            task.cancel()
        await asyncio.gather(reading, *answers, return_exceptions=True)


class _Feed:
    """The frames for one replica."""

    def __init__(self, first: bytes) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_AHEAD)
        self._queue.put_nowait(first)
        self._is_closed = False

    async def put(self, frame: bytes | None) -> None:
        """Adds a frame; None = the trainer has sent everything. Waits for room."""
        if not self._is_closed:
            await self._queue.put(frame)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What is put, in order."""
        while (frame := await self._queue.get()) is not None:
            yield frame

    def close(self) -> None:
        """The replica has answered: nothing is kept for it, and nobody waits for room."""
        self._is_closed = True
        while not self._queue.empty():
            self._queue.get_nowait()


async def _read(frames: AsyncIterator[bytes], feeds: Sequence[_Feed], is_sent: asyncio.Event) -> None:
    async for frame in frames:
        for feed in feeds:
            await feed.put(frame)
    is_sent.set()
    for feed in feeds:
        await feed.put(None)


async def _push(upstream: Upstream, feed: _Feed) -> weights_pb2.PushWeightsResponse:
    call = upstream.push(feed.frames(), metadata=upstream.metadata)
    final = FinalStatus(call)
    try:
        with upstream.running(call), upstream.raising():
            return weights_pb2.PushWeightsResponse.FromString(await final.of(call))
    finally:
        feed.close()
