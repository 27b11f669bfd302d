"""The replicas of a router with everything that looks after each of them."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from genserve.aio import cancel_all, silence
from genserve.errors import GenserveError, InvalidFieldError, LastReplicaError, QueueFullError, ReplicaNotFoundError
from genserve.fleet.fleet import Fleet
from genserve.fleet.hand_over import check_other_has_version, only_there, others_lack_something
from genserve.fleet.member import Member
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.sync import Sync
from genserve.fleet.upstream import Upstream
from genserve.fleet.watch import CALL_AGAIN_S, Watch
from genserve.net import check_replica
from genserve.routing.replica import ReplicaState
from genserve.security.caller import Caller
from genserve.v1 import control_pb2, types_pb2, weights_pb2
from genserve.wire.bounds import MAX_REPLICAS

log = logging.getLogger(__name__)

_READING_S: Final = 1.0
"""In which a router reads what its replicas serve: they serve it meanwhile."""
_ASK_AGAIN_S: Final = 0.5
_MAX_PUSHES: Final = 16
"""As of a daemon."""
_MAX_NAMED: Final = 8
"""Replicas in an error, each by its address."""
_ORDER = (
    types_pb2.PHASE_RUNNING,
    types_pb2.PHASE_APPLYING,
    types_pb2.PHASE_PAUSED,
    types_pb2.PHASE_SLEEPING,
    types_pb2.PHASE_TAINTED,
    types_pb2.PHASE_STARTING,
    types_pb2.PHASE_DRAINING,
    types_pb2.PHASE_DEAD,
)
_SERVING = (types_pb2.PHASE_RUNNING, types_pb2.PHASE_APPLYING, types_pb2.PHASE_PAUSED, types_pb2.PHASE_DRAINING)
"""What a replica may do that gets no requests, and the fleet does not."""


class Router:
    """Adds and removes replicas. `is_draining`: no new requests are to come."""

    def __init__(self, fleet: Fleet, pushes: FleetPushes, replicas: Caller) -> None:
        """`replicas` calls them."""
        self.fleet = fleet
        self.is_draining = False
        self._pushes = pushes
        self._replicas = replicas
        self._instance_id = uuid.uuid4().hex
        # The tasks by which the fleet learns of each replica, and brings it to its version.
        self._looking_after: dict[Upstream, list[asyncio.Task[None]]] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}

    def refuse(self) -> None:
        """Takes no new requests any more, and says so."""
        self.is_draining = True
        self.fleet.states_changed.notify()

    @property
    def weight_version(self) -> int:
        """The version of the fleet; 0 while it is not known."""
        committed = self.fleet.committed
        return committed.number if committed is not None else 0

    def state(self) -> types_pb2.EngineState:
        """The state of the fleet: the phase of the replica that is best off, sums of requests, the fleet's own leases.
        The READY replicas count if there are any. While there are none the fleet does not serve, whatever they do."""
        engines = [member.engine for member in self._counting() if member.engine is not None]
        phases = {engine.phase for engine in engines}
        phase = next((phase for phase in _ORDER if phase in phases), types_pb2.PHASE_STARTING)
        none_ready = self._none_ready()
        if none_ready is not None and phase in _SERVING:
            phase = types_pb2.PHASE_STARTING
        if self.is_draining:
            phase = types_pb2.PHASE_DRAINING
        return types_pb2.EngineState(
            instance_id=self._instance_id,
            weight_version=self.weight_version,
            phase=phase,
            pauses=[lease.message() for lease in self.fleet.leases.active],
            fleet_epoch=self.fleet.desired.epoch,
            running_requests=sum(engine.running_requests for engine in engines),
            waiting_requests=sum(engine.waiting_requests for engine in engines),
            asleep_tags=sorted({tag for engine in engines for tag in engine.asleep_tags}),
            weights_discarded=any(engine.weights_discarded for engine in engines),
            startup=none_ready if phase == types_pb2.PHASE_STARTING else None,
        )

    def _none_ready(self) -> types_pb2.Startup | None:
        """Why no replica serves, and since when; None while one is ready."""
        since_s = self.fleet.none_ready_since_s
        if since_s is None or (self._reads_versions() and time.time() < since_s + _READING_S):
            return None
        startup = types_pb2.Startup(step=self.fleet.why_none())
        startup.step_begin_time.FromMilliseconds(round(1000 * since_s))
        startup.begin_time.CopyFrom(startup.step_begin_time)
        return startup

    def _reads_versions(self) -> bool:
        """Whether replicas have just reported another version than before, as all do when a push is committed."""
        syncing = self.fleet.in_state(ReplicaState.SYNCING)
        return self.fleet.committed is not None and any(each.member.version is None for each in syncing)

    def load(self) -> control_pb2.Load:
        """The load of the fleet: sums of sequences and tokens; means of shares."""
        loads = [member.load for member in self._counting() if member.load is not None]
        count = max(1, len(loads))
        return control_pb2.Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / count,
            tokens_per_second=sum(load.tokens_per_second for load in loads),
            prefix_cache_hit_rate=sum(load.prefix_cache_hit_rate for load in loads) / count,
        )

    def pushes(self) -> list[weights_pb2.PushInFlight]:
        """The pushes in flight on any replica, in the order in which replicas report them: each as it is on the first
        replica of those that have received most of it."""
        furthest: dict[str, weights_pb2.PushInFlight] = {}
        for member in self.fleet.members:
            for push in member.pushes:
                known = furthest.get(push.push_id)
                if known is None or push.received_bytes > known.received_bytes:
                    furthest[push.push_id] = push
        return list(furthest.values())[:_MAX_PUSHES]

    def _counting(self) -> list[Member]:
        return [each.member for each in self.fleet.ready] or self.fleet.members

    def any_replica(self) -> Upstream:
        """One that answers, READY if there is one: for calls that read. Raises NoReplicaError."""
        for state in (ReplicaState.READY, ReplicaState.SYNCING, ReplicaState.DRAINING):
            if found := self.fleet.in_state(state):
                return min(found, key=lambda upstream: upstream.member.inflight)
        raise self.fleet.none_ready()

    def find(self, address: str) -> Upstream:
        """A replica by its address. Raises ReplicaNotFoundError."""
        upstream = self.fleet.upstreams.get(address)
        if upstream is None:
            known = sorted(self.fleet.upstreams)
            more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
            has = f"{', '.join(known[:_MAX_NAMED]) or 'none'}{more}"
            raise ReplicaNotFoundError(f"no replica {address!r} belongs to the fleet, which has {has}")
        return upstream

    def connect(self, member: Member) -> Upstream:
        """A connection to a replica. Raises UnavailableError if a file that it needs cannot be used."""
        return Upstream(member, self._replicas, self.fleet.router.router_id)

    def add(self, address: str, *, joins: bool = False) -> Upstream:
        """Adds a replica, unless it is there; one that is drained stays. `joins`: it is to become what the fleet is,
        whatever is written down there. Raises InvalidFieldError."""
        try:
            check_replica(address)
        except ValueError as error:
            raise InvalidFieldError.of("address", str(error)) from None
        if (known := self.fleet.upstreams.get(address)) is not None:
            if (draining := self._draining.pop(address, None)) is not None:
                draining.cancel()
                known.member.is_draining = known.member.is_given_up = False
                self.fleet.refresh(known)
            return known
        if len(self.fleet.upstreams) >= MAX_REPLICAS:
            raise QueueFullError(f"the limit of {MAX_REPLICAS} replicas is reached")
        upstream = self.connect(Member(address, joins=joins))
        self.fleet.add(upstream)
        looking = Watch(self.fleet, upstream).run(), Sync(self.fleet, upstream, self._pushes).run()
        self._looking_after[upstream] = [asyncio.create_task(each, name=f"replica {address}") for each in looking]
        return upstream

    async def remove(self, address: str) -> None:
        """Removes a replica at once. Raises ReplicaNotFoundError."""
        upstream = self.find(address)
        self._draining.pop(address, None)
        self.fleet.remove(upstream)
        try:
            await cancel_all(self._looking_after.pop(upstream, []))
        finally:
            await upstream.close()

    async def drain(self, address: str, *, force: bool = False) -> None:
        """Removes a replica when its requests have ended, and another one has the version of the fleet, unless `force`
        gives that up. What was begun goes on if this is cancelled."""
        upstream = self.find(address)
        upstream.member.is_draining = True
        upstream.member.is_given_up |= force
        self.fleet.refresh()  # also a drain that waits, and need not any more
        draining = self._draining.get(address)
        if draining is None:
            draining = self._draining[address] = asyncio.create_task(self._drain(upstream), name=f"drain {address}")
        await asyncio.wait({draining})  # which is cancelled if the replica is added again

    async def _drain(self, upstream: Upstream) -> None:
        member, was_waited_for = upstream.member, False  # since it last answered
        while not member.is_gone:
            was_waited_for = was_waited_for and member.engine is None
            if self._has_to_stay(member):
                await self.fleet.states_changed.wait()
            elif member.is_given_up:
                await self.remove(upstream.address)
            elif self._is_missed(member) and not was_waited_for:
                was_waited_for = True
                await self._until_back(member)
            elif await self._is_not_needed(member):
                await self.remove(upstream.address)

    def _has_to_stay(self, member: Member) -> bool:
        """Whether it may not go yet. Replicas that had the version when its drain began may be lost by now."""
        return bool(member.inflight) or (not member.is_given_up and bool(only_there(self.fleet, member)))

    def _is_missed(self, member: Member) -> bool:
        """Whether it is lost, and with it what no other replica is known to have."""
        return member.engine is None and others_lack_something(self.fleet, member)

    async def _until_back(self, member: Member) -> None:
        """Waits for a replica that is lost, for as long as one may be silent, and until it was called again: its
        connection may have broken for a moment, and what it alone has is still there."""
        with suppress(TimeoutError):
            async with silence(self.fleet.settings.silence_s + CALL_AGAIN_S):
                while member.engine is None and not (member.is_given_up or member.is_gone):
                    await self.fleet.states_changed.wait()

    async def _is_not_needed(self, member: Member) -> bool:
        """Whether another replica has said that it has the version. If not, returns when it can be asked again."""
        try:
            await check_other_has_version(self.fleet, member)
        except GenserveError as error:
            log.warning("replica %s goes on draining: %s", member.address, error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    await self.fleet.states_changed.wait()
            return False
        return not (member.is_gone or self._has_to_stay(member))

    async def settle(self) -> None:
        """Waits until all replicas have reported what they serve, or from the first one on for as long as the settings
        say, and tells the version of the fleet from it. The time before the first answer does not count: a router that
        has stood by gets one replica after the other."""
        fleet = self.fleet
        while fleet.committed is None:
            await self._until_known(any, for_ever=True)
            # In which this router may give way to another one, and have none again: then the next one is a first one.
            await self._until_known(lambda known: all(known) or not any(known))
            fleet.settle()

    async def _until_known(self, enough: Callable[[Collection[bool]], bool], *, for_ever: bool = False) -> None:
        fleet = self.fleet
        with suppress(TimeoutError):
            async with asyncio.timeout(None if for_ever else fleet.settings.settle_s):
                changed = fleet.states_changed.next
                while not fleet.members or not enough([member.version is not None for member in fleet.members]):
                    await changed.wait()
                    changed = fleet.states_changed.next

    async def follow(self) -> None:
        """Finds out the version of the fleet, and follows versions that reach every replica without the router. Never
        returns."""
        await self.settle()
        until_s = None
        while True:
            changed = self.fleet.states_changed.next
            is_over = until_s is not None and time.monotonic() >= until_s
            if not self.fleet.follow(waits=not is_over):
                until_s = None
            elif until_s is None:  # as long as for those that do not answer when it starts
                until_s = time.monotonic() + self.fleet.settings.settle_s
            with suppress(TimeoutError):
                async with asyncio.timeout(None if until_s is None else max(0.0, until_s - time.monotonic())):
                    await changed.wait()

    async def check_not_last(self, address: str) -> None:
        """Raises LastReplicaError for the only replica that has a version or adapter that was pushed to the fleet, and
        ReplicaNotFoundError. Waits until it is known what each has."""
        await self.fleet.until_read()
        if what := only_there(self.fleet, self.find(address).member):
            raise LastReplicaError(
                f"replica {address} is the only one that has {what}: wait until another one has it, or set force "
                "(--force) to give it up",
                metadata={"weight_version": str(self.weight_version)},
            )

    async def close(self) -> None:
        """Ends everything."""
        for task in self._draining.values():
            task.cancel()
        await asyncio.gather(*(self.remove(address) for address in list(self.fleet.upstreams)))
