"""The replicas of a router, and where a request goes."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from genserve.control.change import Change
from genserve.errors import NoReplicaError
from genserve.fleet.leases import Leases
from genserve.fleet.member import Member
from genserve.fleet.settings import FleetSettings
from genserve.fleet.upstream import Upstream
from genserve.fleet.version import Version, newest
from genserve.routing.chain import Chain, eligible, why_none
from genserve.routing.replica import Replica, ReplicaState, Request

log = logging.getLogger(__name__)

ANY_REQUEST: Final = Request()


class Fleet:
    """The table of replicas. Whoever changes a member says so with `refresh`, which tells everybody who waits.

    `committed`: the version that the fleet serves, None until it is known; `previous`: the one before, if this router
    has seen it. `states_changed`: the state of a replica, or the committed version, has changed.
    """

    def __init__(self, settings: FleetSettings, chain: Chain) -> None:
        self.settings = settings
        self.chain = chain
        self.committed: Version | None = None
        self.previous: Version | None = None
        self._undecided = ""
        self._deciding: frozenset[str] = frozenset()
        self.leases = Leases()
        self.states_changed = Change()
        self._upstreams: dict[str, Upstream] = {}
        self._where: dict[str, tuple[ReplicaState, str]] = {}

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """The replicas, by address."""
        return MappingProxyType(self._upstreams)

    @property
    def members(self) -> list[Member]:
        """The replicas, in order of their addresses."""
        return [self._upstreams[address].member for address in sorted(self._upstreams)]

    def where(self, member: Member) -> tuple[ReplicaState, str]:
        """The state of a replica, and why it is not READY."""
        return self._where.get(member.address, (ReplicaState.GONE, "it was removed"))

    def in_state(self, *states: ReplicaState) -> list[Upstream]:
        """The replicas in one of these states, in order of their addresses."""
        return [self._upstreams[address] for address in sorted(self._upstreams) if self._where[address][0] in states]

    @property
    def ready(self) -> list[Upstream]:
        """The replicas that get requests."""
        return self.in_state(ReplicaState.READY)

    @property
    def answering(self) -> list[Upstream]:
        """The replicas that answer, whether they get requests or not."""
        return self.in_state(ReplicaState.READY, ReplicaState.SYNCING, ReplicaState.DRAINING)

    def add(self, upstream: Upstream) -> None:
        """Adds a replica."""
        self._upstreams[upstream.address] = upstream
        self.refresh()

    def remove(self, upstream: Upstream) -> None:
        """Removes a replica, and ends its calls. Its connection is to be closed by who opened it."""
        if self._upstreams.get(upstream.address) is upstream:
            del self._upstreams[upstream.address]
            del self._where[upstream.address]
            self.leases.left(upstream.address)
        upstream.member.is_gone = True
        upstream.cut()
        self.refresh()

    def lost(self, upstream: Upstream, failure: str, *, cuts: bool = True) -> None:
        """A replica does not answer: its calls end, so that requests can go elsewhere, unless it `cuts` none because it
        ends them itself."""
        upstream.member.lost(failure)
        self.leases.left(upstream.address)
        if cuts:
            upstream.cut()
        self.refresh()

    def commit(self, version: Version) -> None:
        """From now on requests go only to replicas that serve this version."""
        self.previous, self.committed = self.committed, version
        self._undecided = ""
        self.refresh()

    def is_committing(self, push_id: str, deciding: Iterable[Upstream]) -> None:
        """Replicas are told to commit a push. The first one of `deciding` that turns out to serve it decides, also if
        all answers are lost."""
        self._undecided = push_id
        self._deciding = frozenset(upstream.address for upstream in deciding)

    def serves(self, upstream: Upstream, version: Version) -> None:
        """A replica has told what it serves."""
        upstream.member.serves(version)
        if version.push_id and version.push_id == self._undecided and upstream.address in self._deciding:
            self.commit(version)

    def settle(self) -> None:
        """Finds out which version is committed, from what the replicas serve."""
        if self.committed is None:
            versions = (member.version for member in self.members if member.version is not None)
            if (found := newest(versions)) is not None:
                log.info("the fleet serves version %d", found.number)
                self.commit(found)

    def refresh(self, upstream: Upstream | None = None) -> None:
        """Tells who waits if the state of a replica has changed: of this one, None = of any, because the committed
        version or the leases of the fleet have changed."""
        changed = False
        for each in self._upstreams.values() if upstream is None else (upstream,):
            if self._upstreams.get(each.address) is each:
                changed = self._refreshed(each) or changed
        if changed or upstream is None:
            self.states_changed.tell()

    def _refreshed(self, upstream: Upstream) -> bool:
        member = upstream.member
        member.holds_leases = not self.leases.missing(member.address)
        where, before = member.where(self.committed), self._where.get(member.address)
        if where == before:
            return False
        self._where[member.address] = where
        if before is None or where[0] is not before[0]:
            state, reason = where
            log.info("replica %s is %s%s", member.address, state.value, f": {reason}" if reason else "")
        return True

    def replicas(self) -> list[Replica]:
        """What policies know of the replicas."""
        where = self._where
        return [upstream.member.as_replica(where[address][0]) for address, upstream in self._upstreams.items()]

    def elsewhere(self, request: Request, tried: Collection[str]) -> bool:
        """Whether another replica than those may serve a request now."""
        committed = self.committed
        if committed is None:
            return False
        return any(each.instance_id not in tried for each in eligible(request, self.replicas(), committed.number))

    def choose(self, request: Request, tried: Collection[str] = ()) -> Upstream | None:
        """Where a request goes, None if no replica may serve it now."""
        committed = self.committed
        if committed is None:
            return None
        decision = self.chain.route(request, self.replicas(), committed.number, tried)
        return None if decision is None else self._upstreams[decision.candidates[0].address]

    async def route(self, request: Request, tried: Collection[str] = (), timeout_s: float | None = None) -> Upstream:
        """Where a request goes: waits until some replica may serve it. `tried`: instance ids of replicas that have
        failed for it. Raises NoReplicaError after `timeout_s`, or after the fleet's own limit."""
        limit_s = self.settings.wait_ready_s
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
        if self.committed is None:
            return f"no replica of {len(self._upstreams)} has answered yet" if self._upstreams else "the fleet is empty"
        return why_none(request, self.replicas(), self.committed.number)

    def none_ready(self) -> NoReplicaError:
        """The error for a call that no replica can serve now."""
        return NoReplicaError(self.why_none(), retry_after_s=1.0)

    @contextmanager
    def carrying(self, request: Request, upstream: Upstream) -> Iterator[None]:
        """Counts a request as the replica's for the length of the block."""
        member = upstream.member
        self.chain.sent(request, member.as_replica(self.where(member)[0]))
        member.sent(request.num_sequences)
        try:
            yield
        finally:
            member.ended(request.num_sequences)
            if member.is_draining and not member.inflight:
                self.states_changed.tell()
