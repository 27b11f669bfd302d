"""The replicas that requests can go to, and which of them one goes to."""

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from genserve.aio import Change
from genserve.errors import NoReplicaError
from genserve.forward.upstream import TokenUpstream
from genserve.routing.chain import Chain, eligible, why_none
from genserve.routing.replica import Replica, Request

UpstreamT = TypeVar("UpstreamT", bound=TokenUpstream)

ANY_REQUEST: Final = Request()


class Destinations(Generic[UpstreamT]):
    """Base of the tables of replicas. `states_changed`: the state of a replica, or the version that all serve, has
    changed. `knows_adapters`: whether it is known which adapters a replica has. `newest_version`: the highest version
    that the fleet has served since this table is there; it serves a lower one after a push back to that."""

    knows_adapters = True

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.states_changed = Change()
        self.newest_version = 0

    # --- what a table knows

    @property
    def wait_ready_s(self) -> float:
        """How long a request waits for a replica that may serve it, in seconds."""
        raise NotImplementedError

    @property
    def committed_version(self) -> int | None:
        """The version that the fleet serves: no request goes to a replica that is behind it. None = not known."""
        raise NotImplementedError

    def replicas(self) -> list[Replica]:
        """The replicas as policies see them."""
        raise NotImplementedError

    def lives(self, instance_id: str, address: str) -> bool | None:
        """Whether a run of a daemon is there, to which a connection broke. False = it is taken for dead, for now;
        None = nobody knows yet."""
        raise NotImplementedError

    def upstream_at(self, address: str) -> UpstreamT:
        """The replica of this address, which is one of `replicas`."""
        raise NotImplementedError

    def lose(self, upstream: UpstreamT) -> None:
        """A request to a replica was lost."""

    def doubt(self, upstream: UpstreamT) -> None:
        """A replica serves older weights than it was known for: nothing is sent there until more is known."""
        raise NotImplementedError

    def _sent(self, upstream: UpstreamT, num_sequences: int) -> Replica:
        """So many sequences are sent there from now on. Returns what policies knew before."""
        raise NotImplementedError

    def _ended(self, upstream: UpstreamT, num_sequences: int) -> None:
        """They have ended."""
        raise NotImplementedError

    # --- what follows from it

    def elsewhere(self, request: Request, tried: Collection[str]) -> bool:
        """Whether a replica may serve a request that is not one of those that have been tried."""
        committed = self.committed_version
        if committed is None:
            return False
        return any(each.instance_id not in tried for each in eligible(request, self.replicas(), committed))

    def choose(self, request: Request, tried: Collection[str] = ()) -> UpstreamT | None:
        """Where a request goes, None if no replica may serve it now."""
        committed = self.committed_version
        if committed is None:
            return None
        decision = self.chain.route(request, self.replicas(), committed, tried)
        return None if decision is None else self.upstream_at(decision.candidates[0].address)

    async def route(self, request: Request, tried: Collection[str] = (), timeout_s: float | None = None) -> UpstreamT:
        """Where a request goes: waits until some replica may serve it. `tried`: instance ids of replicas that have
        failed for it. Raises NoReplicaError after `timeout_s`, or after `wait_ready_s`."""
        limit_s = self.wait_ready_s
        until_s = time.monotonic() + (limit_s if timeout_s is None else min(timeout_s, limit_s))
        while True:
            if (chosen := self.choose(request, tried)) is not None:
                return chosen
            try:  # nothing was awaited since the choice, so no change was missed
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    await self.states_changed.wait()
            except TimeoutError:
                raise NoReplicaError(self.why_none(request), retry_after_s=1.0) from None

    def why_none(self, request: Request = ANY_REQUEST) -> str:
        """Why no replica may serve a request, for people."""
        committed, replicas = self.committed_version, self.replicas()
        if committed is None:
            return f"none of {len(replicas)} replicas can be used yet" if replicas else "the fleet is empty"
        return why_none(request, replicas, committed)

    @contextmanager
    def carrying(self, request: Request, upstream: UpstreamT) -> Iterator[None]:
        """Counts a request as the replica's for the length of the block."""
        self.chain.sent(request, self._sent(upstream, request.num_sequences))
        try:
            yield
        finally:
            self._ended(upstream, request.num_sequences)
