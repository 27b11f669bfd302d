"""A push on its way to replicas: the frames of a trainer's stream, handed to replicas as they come, or the spread
from the replica that receives it to all others."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Final

from genserve.aio import cancel_all
from genserve.errors import DeadlineError, GenserveError, PushNotFoundError
from genserve.fleet.upstream import ASK_S, FETCH_S, Upstream
from genserve.transport.streams import FinalStatus
from genserve.v1 import weights_pb2
from genserve.wire.bounds import MAX_PEERS

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
        """The items in the order of `put`."""
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


_KNOWN_S: Final = 30.0
_HOP_S: Final = 0.1
"""A push is known at a replica as soon as that has asked its parent for it: in a chain, one after the other."""
_ASK_EVERY_S: Final = 0.02


class Spread:
    """Makes every replica but the first one fetch the push from its parent in the tree, while it still arrives there.
    `tasks` has the task of each: its result is the replica's push."""

    def __init__(self, request: weights_pb2.LoadWeightsRequest, replicas: Sequence[Upstream], fanout: int) -> None:
        """`request` without a source; the first of the `replicas` receives the push from elsewhere."""
        self._request = request
        self._known = {upstream.address: asyncio.Event() for upstream in replicas}
        self._sources = sources([upstream.address for upstream in replicas], fanout)
        self._until_s = time.monotonic() + _KNOWN_S + _HOP_S * len(replicas)
        self.tasks: Mapping[Upstream, asyncio.Task[weights_pb2.Push]] = {
            upstream: asyncio.create_task(self._load(upstream), name=f"load at {upstream.address}")
            for upstream in replicas[1:]
        }
        self._asking = [asyncio.create_task(self._mark_known(upstream), name="ask for a push") for upstream in replicas]

    async def _mark_known(self, upstream: Upstream) -> None:
        """Waits until the replica knows the push: its children would find nothing before. They ask their other sources
        if it does not get the push, or not in time."""
        if parents := self._sources.get(upstream.address):
            await self._known[parents[0]].wait()
        request = weights_pb2.GetPushRequest(push_id=self._request.push_id)
        loading = self.tasks.get(upstream)
        while time.monotonic() < self._until_s and (loading is None or not loading.done()):
            try:
                await upstream.ask(upstream.weights.GetPush, request, ASK_S)
                break
            except PushNotFoundError:
                await asyncio.sleep(_ASK_EVERY_S)
            except GenserveError:
                break
        self._known[upstream.address].set()

    async def _load(self, upstream: Upstream) -> weights_pb2.Push:
        peers = self._sources[upstream.address]
        try:
            async with asyncio.timeout(self._until_s + ASK_S - time.monotonic()):
                await self._known[peers[0]].wait()
        except TimeoutError:
            raise DeadlineError(f"{peers[0]} did not receive the push") from None
        request = weights_pb2.LoadWeightsRequest()
        request.CopyFrom(self._request)
        request.peers.push_id = request.push_id
        request.peers.addresses.extend(peers)
        return (await upstream.ask(upstream.weights.LoadWeights, request, FETCH_S)).push

    async def end(self) -> None:
        """Ends what still runs."""
        await cancel_all([*self._asking, *self.tasks.values()])


def sources(addresses: Sequence[str], fanout: int) -> dict[str, tuple[str, ...]]:
    """Where each replica but the first one fetches a push that the first one receives: from its parent, and if that
    fails from the parent's parent and so on.

    Replica i has the children i * fanout + 1 ... i * fanout + fanout: a chain for a fanout of 1, in which every replica
    sends one copy; a star if the fanout is the number of the others.
    """
    if fanout < 1:
        raise ValueError(f"fanout must be at least 1, is {fanout}")
    found: dict[str, tuple[str, ...]] = {}
    for index, address in enumerate(addresses[1:], 1):
        ancestors = []
        while index > 0:
            index = (index - 1) // fanout
            ancestors.append(addresses[index])
        found[address] = tuple(ancestors[: MAX_PEERS - 1]) + ((addresses[0],) if len(ancestors) >= MAX_PEERS else ())
    return found
