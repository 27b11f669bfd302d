"""The replicas of a fleet as a client knows them, and where its requests go."""

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Final

from genserve.aio import Backoff
from genserve.client.direct.replica import DirectUpstream, KnownReplica
from genserve.client.direct.settings import Direct
from genserve.errors import GenserveError, UnavailableError
from genserve.forward.destinations import ANY_REQUEST, Destinations
from genserve.forward.upstream import is_lost
from genserve.net import is_local
from genserve.routing.chain import with_reasons
from genserve.routing.names import make_chain, parse_policies
from genserve.routing.replica import Replica, Request
from genserve.transport.connection import Connection
from genserve.transport.errors import ClientClosedError
from genserve.v1 import fleet_pb2, generation_pb2
from genserve.wire.bounds import MAX_REPLICAS

TOKENIZE_TIMEOUT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0
_REASONS: Final = 3
"""The number of replicas that an error names as unreachable."""

Told = fleet_pb2.WatchReplicasResponse


class DirectReplicas(Destinations[DirectUpstream]):
    """The table of replicas. The task that watches the router calls `tell` and `miss`; `asks` is set when somebody
    needs an answer of the router that is newer.

    A replica is READY here if it is so for the router, and the same run of the daemon has answered this client.
    """

    knows_adapters = False

    def __init__(self, connection: Connection, settings: Direct) -> None:
        names = parse_policies(settings.policies)
        super().__init__(make_chain(names, random.Random(), time.monotonic, settings.overload_threshold))
        self.asks = asyncio.Event()
        self._connection = connection
        self._settings = settings
        self._upstreams: dict[str, DirectUpstream] = {}
        self._version = 0
        self._heard_at_s: float | None = None
        self._failure: GenserveError | None = None
        self._num_begun = 0  # calls to the router
        self._num_answered = 0  # the last of them that was answered, or has failed
        self._has_begun = False
        self._reaching: dict[DirectUpstream, asyncio.Task[None]] = {}
        self._lost: dict[DirectUpstream, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # --- what the router tells

    def begin(self) -> int:
        """The number of a call to the router that begins now."""
        self.asks.clear()
        self._num_begun += 1
        return self._num_begun

    def tell(self, told: Told, call: int) -> None:
        """The router has reported its replicas: all of them."""
        before = self._states()
        self._version = told.weight_version
        self.newest_version = max(self.newest_version, self._version)
        addresses = set()
        for each in told.replicas[:MAX_REPLICAS]:
            addresses.add(each.address)
            upstream = self._upstreams.get(each.address)
            if upstream is None:
                known = KnownReplica(each.address, self._unreachable(each.address))
                upstream = self._upstreams[each.address] = DirectUpstream(self._connection, known)
            elif each.engine.instance_id != upstream.instance_id:
                self._stop_reaching(upstream)  # another daemon is to be reached there, at once
            upstream.known.tell(each, told.weight_version)
            self._look_after(upstream)
        for address in self._upstreams.keys() - addresses:
            self._leave(self._upstreams.pop(address))
        self._heard_at_s, self._failure, self._num_answered = time.monotonic(), None, call
        if self._states() != before:
            self.states_changed.notify()

    def miss(self, failure: GenserveError, call: int) -> None:
        """A call to the router has failed."""
        self._failure, self._num_answered = failure.with_traceback(None), call
        self.states_changed.notify()

    def _states(self) -> tuple[object, ...]:
        states = {address: (each.known.where, each.instance_id) for address, each in self._upstreams.items()}
        return self._num_answered, self._version, states

    def _unreachable(self, address: str) -> str:
        target = self._connection.target
        if not is_local(address) or is_local(target):
            return ""
        return (
            f"it is an address of the router's host alone, and this client calls the router at {target}: name "
            "replicas by addresses that clients can reach, or do without direct"
        )

    def _leave(self, upstream: DirectUpstream) -> None:
        """The router has removed it. What runs there goes on: the daemon does, too."""
        upstream.known.leave()
        self._stop_reaching(upstream)
        if not upstream.known.inflight:
            self._close(upstream)

    # --- whether the client reaches a replica

    def _look_after(self, upstream: DirectUpstream) -> None:
        known = upstream.known
        if known.is_told_ready and not known.is_reached and not known.unreachable and upstream not in self._reaching:
            self._reaching[upstream] = asyncio.create_task(self._reach(upstream), name=f"reaching {known.address}")
        is_lost = known.told.state == fleet_pb2.REPLICA_STATE_UNHEALTHY
        if is_lost and upstream not in self._lost:
            # Its connection may break by itself, when it shuts down; or hang, when its host has vanished.
            loop = asyncio.get_running_loop()
            self._lost[upstream] = loop.call_later(self._settings.silence_s, upstream.cut)
        elif not is_lost and (timer := self._lost.pop(upstream, None)) is not None:
            timer.cancel()

    async def _reach(self, upstream: DirectUpstream) -> None:
        known, backoff = upstream.known, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        try:
            while known.is_told_ready and not known.is_reached:
                expected = known.instance_id
                failure = await upstream.reach(self._settings.connect_timeout_s)
                if failure and expected == known.instance_id:
                    known.miss(failure)
                self.states_changed.notify()
                if failure:
                    await asyncio.sleep(backoff.next_s())
        except ClientClosedError:
            pass  # the end of everything
        finally:
            if self._reaching.get(upstream) is asyncio.current_task():
                del self._reaching[upstream]

    def _stop_reaching(self, upstream: DirectUpstream) -> None:
        if (reaching := self._reaching.pop(upstream, None)) is not None:
            reaching.cancel()

    def lose(self, upstream: DirectUpstream) -> None:
        """It gets no requests until it has answered again, to a call that begins now."""
        self._stop_reaching(upstream)
        self.doubt(upstream)

    def doubt(self, upstream: DirectUpstream) -> None:
        """The same."""
        if not upstream.known.unreachable and upstream not in self._reaching:
            upstream.known.miss("")
            if not upstream.known.is_gone:
                self._look_after(upstream)

    # --- for requests

    @property
    def wait_ready_s(self) -> float:
        """How long a request waits for a replica that may serve it."""
        return self._settings.wait_ready_s

    @property
    def is_known(self) -> bool:
        """Whether the router has reported its replicas, not too long ago."""
        return self._heard_at_s is not None and time.monotonic() - self._heard_at_s <= self._settings.keep_s

    @property
    def committed_version(self) -> int | None:
        """The version of the fleet as last reported, None if that was too long ago."""
        return self._version if self.is_known else None

    async def known_for(self, request: Request) -> None:
        """Returns when enough is known to choose a replica for a request, or to wait for one. Raises UnavailableError
        if the router does not answer or no replica can be reached, and what the router answers to a client that may
        not watch it."""
        if not self.is_known:
            await self._ask(self._num_answered + 1)
            if not self.is_known and self._failure is not None:
                raise self._failure.again()
        if (asked := request.min_weight_version) is not None and asked > self._version:
            await self._ask(self._num_begun + 1)  # the fleet may have it since
        while not self._has_begun:
            told_ready = [each.known for each in self._upstreams.values() if each.known.is_told_ready]
            failures = [_failure(known) for known in told_ready if not known.is_reached]
            if all(failures):  # all have been tried: the first requests do not all go to whoever answers first
                if told_ready and len(failures) == len(told_ready):
                    raise UnavailableError(f"this client reaches no replica of the fleet: {_first(failures)}")
                self._has_begun = bool(told_ready)
                return
            await self.states_changed.wait()

    async def _ask(self, call: int) -> None:
        """Returns when the router has answered this call or a later one, or could not be reached by it."""
        while self._num_answered < call:
            changed = self.states_changed.next
            if self._num_begun < call or self._num_begun == self._num_answered:
                self.asks.set()
            await changed.wait()

    def replicas(self) -> list[Replica]:
        """The replicas as policies see them."""
        return [upstream.known.as_replica() for upstream in self._upstreams.values()]

    def lives(self, instance_id: str, address: str) -> bool | None:
        """Whether a run of a daemon is there. That it is not reached, or not told of, may be due to the network or to a
        router that is new: only one that has started again is gone for sure."""
        upstream = self._upstreams.get(address)
        if upstream is None or not upstream.instance_id:
            return None
        if upstream.instance_id != instance_id:
            return False
        return True if upstream.known.is_reached else None

    def upstream_at(self, address: str) -> DirectUpstream:
        """The replica of this address."""
        return self._upstreams[address]

    def why_none(self, request: Request = ANY_REQUEST) -> str:
        """Why no replica may serve a request, for people."""
        if self._heard_at_s is None or not self.is_known:
            failure = "" if self._failure is None else f": {self._failure.message}"
            return f"the router at {self._connection.target} has told nothing for {self._settings.keep_s:g} s{failure}"
        reasons = {address: each.known.where[1] for address, each in self._upstreams.items()}
        return with_reasons(super().why_none(request), reasons)

    def _sent(self, upstream: DirectUpstream, num_sequences: int) -> Replica:
        known = upstream.known.as_replica()
        upstream.known.count(num_sequences)
        return known

    def _ended(self, upstream: DirectUpstream, num_sequences: int) -> None:
        upstream.known.count(-num_sequences)
        if upstream.known.is_gone and not upstream.known.inflight:
            self._close(upstream)

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Token ids from any replica, and from another one if that is lost. Raises GenserveError."""
        tried: set[str] = set()
        while True:
            upstream = await self.route(ANY_REQUEST, tried, TOKENIZE_TIMEOUT_S)
            try:
                return await upstream.tokenize(request, TOKENIZE_TIMEOUT_S)
            except GenserveError as error:
                if not is_lost(error):
                    raise
                tried.add(upstream.instance_id)

    # --- the end

    def _close(self, upstream: DirectUpstream) -> None:
        if (timer := self._lost.pop(upstream, None)) is not None:
            timer.cancel()
        closing = asyncio.create_task(upstream.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def stop(self) -> None:
        """Nobody watches any more: ends the tasks. The connections end with that to the router."""
        for task in self._reaching.values():
            task.cancel()
        for timer in self._lost.values():
            timer.cancel()


def _failure(known: KnownReplica) -> str:
    return f"{known.address}: {known.failure}" if known.failure else ""


def _first(failures: Iterable[str]) -> str:
    return "; ".join(sorted(set(failures))[:_REASONS])
