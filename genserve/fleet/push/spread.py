"""A push on its way from the replica that receives it to all others."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from genserve.aio import cancel_all
from genserve.errors import DeadlineError, GenserveError, PushNotFoundError
from genserve.fleet.upstream import ASK_S, FETCH_S, Upstream
from genserve.v1 import weights_pb2
from genserve.wire.bounds import MAX_PEERS

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
