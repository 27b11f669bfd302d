"""Brings a replica to the version of the fleet, and pauses it where the fleet is paused."""

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from genserve.aio import Backoff
from genserve.errors import DeadlineError, GenserveError, NoReplicaError, PushConflictError, PushNotFoundError
from genserve.fleet.desired import Version
from genserve.fleet.everywhere import lacks_record, write_on
from genserve.fleet.fleet import Fleet
from genserve.fleet.hand_over import check_other_has_version, may_end
from genserve.fleet.leases import FleetLease
from genserve.fleet.pauses import leased_by, resume_on
from genserve.fleet.push.adapters import ask_loras, bring_pushed_lora
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.upstream import ASK_S, FETCH_S, WAKE_S, Upstream, apply_s, load_lora_s, pause_s
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2, types_pb2, weights_pb2
from genserve.wire.bounds import MAX_PEERS
from genserve.wire.conversions import duration_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_WAITING: Final = (weights_pb2.PUSH_STATE_STAGED, weights_pb2.PUSH_STATE_PREPARED)


class Sync:
    """Looks after one replica."""

    def __init__(self, fleet: Fleet, upstream: Upstream, pushes: FleetPushes) -> None:
        """`pushes`: those that are on their way, which may bring it a newer version."""
        self._fleet = fleet
        self._upstream = upstream
        self._member = upstream.member
        self._pushes = pushes
        self._tried = ""  # what was urgent when it was tried last

    async def run(self) -> None:
        """Runs until it is cancelled."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            changed = self._fleet.states_changed.next
            if not self._can_be_helped():
                backoff.reset()
                await changed.wait()
                continue
            try:
                await self._help()
                self._member.sync_failure = ""
                self._fleet.refresh()
                if self._can_be_helped():  # it did not help
                    await self._rest(backoff.next_s())
            except GenserveError as error:
                self._member.sync_failure = error.message
                log.warning("replica %s could not be brought to what the fleet is: %s",
                            self._upstream.address, error.message)  # fmt: skip
                await self._rest(backoff.next_s())
            except Exception as error:  # a fault of ours: it is tried again as any other
                self._member.sync_failure = f"the router failed to sync it: {error!r}"
                log.exception("the sync of replica %s failed", self._upstream.address)
                await self._rest(_MAX_PAUSE_S)
            self._fleet.refresh()

    async def _rest(self, pause_s: float) -> None:
        """Before the next attempt. What has become urgent since that was tried is done at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                while self._urgent in ("", self._tried):
                    await self._fleet.states_changed.wait()

    @property
    def _urgent(self) -> str:
        """Why it cannot wait; "" = it can."""
        if may_end(self._fleet, self._member):
            return "it waits for a word to end"
        return "it gets no requests" if self._fleet.where(self._member)[0] is ReplicaState.SYNCING else ""

    def _can_be_helped(self) -> bool:
        member, committed = self._member, self._fleet.committed
        if self._fleet.leases.left_over(member.address) or may_end(self._fleet, member):
            return True
        if committed is None or member.version is None:
            return False
        state, _ = self._fleet.where(member)
        if state is ReplicaState.READY:
            return lacks_record(self._fleet, self._upstream) or bool(self._missing_loras() or self._missing_pushed())
        if state is not ReplicaState.SYNCING:
            return False
        if self._needs_version(committed):
            return self._may_be_brought(committed) and not self._pushes.includes(self._upstream)
        return bool(self._fleet.leases.to_give(member.address)) or self._sleeps_otherwise

    def _may_be_brought(self, committed: Version) -> bool:
        """Whether the version of the fleet may take the place of what it serves. A newer one that somebody has brought
        to this replica alone, as vLLM's own transfer does to one after the other, is left to him."""
        member = self._member
        if committed.is_checkpoint:
            return False  # nobody can bring it another one
        return self._is_tainted or not member.is_ahead_of(committed)

    @property
    def _sleeps_otherwise(self) -> bool:
        tags, engine = self._fleet.desired.asleep_tags, self._member.engine
        return tags is not None and engine is not None and set(engine.asleep_tags) != tags

    def _missing_loras(self) -> dict[str, str]:
        """The directories of adapters that all replicas should have loaded from there."""
        desired, member = self._fleet.desired, self._member
        if desired.asleep_tags is None or desired.asleep_tags:
            return {}
        return {name: path for name, path in desired.loras_to_load.items() if member.lacks_lora_of(name, path)}

    def _missing_pushed(self) -> Mapping[str, str]:
        """The pushes of adapters that all replicas should have loaded."""
        tags = self._fleet.desired.asleep_tags
        return {} if tags is None or tags else self._member.missing_loras

    def _needs_version(self, committed: Version) -> bool:
        version = self._member.version
        return self._is_tainted or (version is not None and not version.is_same(committed))

    @property
    def _is_tainted(self) -> bool:
        engine = self._member.engine
        return engine is not None and engine.phase == types_pb2.PHASE_TAINTED

    async def _help(self) -> None:
        self._tried = self._urgent
        leases, address = self._fleet.leases, self._member.address
        for lease_id, own_id in leases.left_over(address):
            if (lease_id, own_id) in leases.left_over(address):  # it may be granted again meanwhile
                await self._resume(lease_id, own_id)
        if may_end(self._fleet, self._member):
            await self._let_go()
        committed = self._fleet.committed
        if committed is None or not self._takes_part:
            return
        for lease in leases.to_give(address):
            if lease in leases.to_give(address):  # it may have ended meanwhile
                await self._pause(lease)
        await self._wake_up()
        if (record := self._fleet.record()) is not None:  # of now: it may have changed meanwhile
            await self._bring(record)
        if self._sleeps_otherwise:
            await self._sleep()
            await self._wake_up()  # weights fall asleep only together with the rest
        if lacks_record(self._fleet, self._upstream):
            await write_on(self._fleet, self._upstream)
        self._tried = self._urgent
        await self._load_loras()

    async def _load_loras(self) -> None:
        """All that the fleet has loaded, as long as it is ready. One that cannot be had, or that it refuses, keeps no
        other one away; for one that takes too long the others wait, so the order is another each time. Raises the error
        of the last."""
        missing = [partial(self._load_lora, name, path) for name, path in self._missing_loras().items()]
        missing += [partial(self._bring_lora, name, push_id) for name, push_id in self._missing_pushed().items()]
        random.shuffle(missing)
        failed: GenserveError | None = None
        for load in missing:
            if self._fleet.where(self._member)[0] is not ReplicaState.READY:
                break  # it may need the fleet's next version first
            try:
                await load()
            except DeadlineError:
                raise  # it may hang, and somebody may wait for something else of it
            except GenserveError as error:
                failed = error
        if failed is not None:
            raise failed

    async def _bring_lora(self, name: str, push_id: str) -> None:
        if self._missing_pushed().get(name) == push_id:  # it may have been unloaded or replaced meanwhile
            await bring_pushed_lora(self._fleet, self._upstream, name, push_id)

    async def _let_go(self) -> None:
        """Tells a daemon that shuts down that it need not wait, once another one that has the version has answered.
        Raises the error of either."""
        await check_other_has_version(self._fleet, self._member)
        if not may_end(self._fleet, self._member):  # meanwhile it has started again, say: this would end it
            return
        await self._upstream.ask(self._upstream.control.Drain, control_pb2.DrainRequest(), ASK_S)
        self._member.is_let_go = True

    @property
    def _takes_part(self) -> bool:
        return self._fleet.where(self._member)[0] in (ReplicaState.SYNCING, ReplicaState.READY)

    async def _sleep(self) -> None:
        asleep, upstream = self._fleet.desired.asleep, self._upstream
        tags = [] if "weights" in asleep.tags else sorted(asleep.tags)
        request = control_pb2.SleepRequest(level=asleep.level, tags=tags)
        answer = await upstream.ask(upstream.control.Sleep, request, pause_s(request))
        self._set_state(answer.state)

    async def _wake_up(self) -> None:
        """Wakes what sleeps there, and not in the fleet."""
        upstream, engine, tags = self._upstream, self._member.engine, self._fleet.desired.asleep_tags
        if tags is None or engine is None or not (too_much := set(engine.asleep_tags) - tags):
            return
        request = control_pb2.WakeUpRequest(tags=sorted(too_much))
        answer = await upstream.ask(upstream.control.WakeUp, request, WAKE_S)
        self._set_state(answer.state)

    async def _load_lora(self, name: str, path: str) -> None:
        upstream = self._upstream
        request = control_pb2.LoadLoraRequest(lora_name=name, path=path)
        turns = self._fleet.lora_turns
        if turns.of(name).locked():
            return  # another replica may hang in it, and this one may need something else meanwhile
        with turns.holding_off(name):
            if self._missing_loras().get(name) == path:  # it may have been unloaded meanwhile
                await upstream.ask(upstream.control.LoadLora, request, load_lora_s(request))
                await ask_loras(upstream)

    def _set_state(self, state: types_pb2.EngineState) -> None:
        if self._member.engine is not None:
            self._member.engine = state  # its next report comes later
        self._fleet.refresh(self._upstream)

    async def _pause(self, lease: FleetLease) -> None:
        if lease.is_behind_on(self._member.address):
            await self._renew(lease)
            return
        request = control_pb2.PauseRequest(
            mode=lease.mode,
            holder=lease.holder,
            request_id=lease.lease_id,
            fleet_lease_id=lease.lease_id,
        )
        if (remaining_s := lease.remaining_s()) is None:
            request.no_expiry = True
        else:
            request.ttl.CopyFrom(duration_of(max(remaining_s, 0.1)))
        upstream, leases, call = self._upstream, self._fleet.leases, self._upstream.control.Pause
        await leased_by(upstream, leases, lease.lease_id, lease.holder, call, request, pause_s(request))

    async def _renew(self, lease: FleetLease) -> None:
        upstream, leases, call = self._upstream, self._fleet.leases, self._upstream.control.RenewPause
        request = control_pb2.RenewPauseRequest(lease_id=lease.on_replicas[upstream.address].lease_id)
        if (remaining_s := lease.remaining_s()) is not None:
            request.ttl.CopyFrom(duration_of(max(remaining_s, 0.1)))
        await leased_by(upstream, leases, lease.lease_id, lease.holder, call, request, ASK_S)

    async def _resume(self, lease_id: str, own_id: str) -> None:
        with self._fleet.lease_turns.holding_off(lease_id):
            await resume_on(self._upstream, own_id)
        self._fleet.leases.resumed(lease_id, self._member.address)

    async def _bring(self, record: types_pb2.FleetState) -> None:
        """Brings it to the version of this record, if it serves another one."""
        committed, member = Version.of(record), self._member
        if not self._needs_version(committed) or not self._may_be_brought(committed):
            return
        before = member.version  # a push that overtakes what is asked for here is not undone by it
        member.is_being_brought = True
        try:
            state = await self._commits(record) or await self._fetch(record, before)
            member.serves(committed)
            if state.fleet_epoch == record.epoch:
                member.keeps(record)
        finally:
            member.is_being_brought = False
            self._fleet.refresh(self._upstream)

    async def _fetch(self, record: types_pb2.FleetState, before: Version | None) -> types_pb2.EngineState:
        """Returns the state in which it serves the version. `before`: what it serves until then, None = not known."""
        committed = Version.of(record)
        upstream = self._upstream
        # One that shuts down waits until its version is handed over.
        peers = [
            each
            for each in self._fleet.ready or self._fleet.in_state(ReplicaState.DRAINING)
            if each is not upstream and each.member.version is not None and each.member.version.is_same(committed)
        ]
        if not peers:
            raise NoReplicaError(f"no replica has version {committed.number} to fetch it from")
        random.shuffle(peers)
        # A part of the tensors has another digest than the whole that was made of it: the peer tells that of the whole.
        served = await _served(peers[0])
        if not served.is_same(committed):
            raise NoReplicaError(f"{peers[0].address} does not serve version {committed.number} any more")
        # One that was brought back to the version has it by another push than the others.
        alike = [each for each in peers if each is peers[0] or _push_of(each) == served.push_id]
        log.info("replica %s fetches version %d", upstream.address, committed.number)
        request = weights_pb2.LoadWeightsRequest(
            push_id=committed.push_id,
            weight_version=committed.number,
            force=True,
            peers=weights_pb2.WeightPeers(
                addresses=[each.address for each in alike[:MAX_PEERS]], push_id=served.push_id
            ),
            content_digest=served.content_digest,
            fleet=record,
        )
        if before is not None:
            request.expected_version = before.number
        was_tainted = self._is_tainted
        try:
            answer = await upstream.ask(upstream.weights.LoadWeights, request, FETCH_S)
        except PushConflictError:
            # It has other bytes under this id, such as a part that does not belong on what it serves.
            discard = weights_pb2.DiscardPushRequest(push_id=committed.push_id, force=True)
            await upstream.ask(upstream.weights.DiscardPush, discard, ASK_S)
            raise
        if was_tainted or not (await _served(upstream)).is_same(committed):
            # It has applied this push before, answers what it did then, and serves something else.
            request.push_id = uuid.uuid4().hex
            answer = await upstream.ask(upstream.weights.LoadWeights, request, FETCH_S)
        return answer.state

    async def _commits(self, record: types_pb2.FleetState) -> types_pb2.EngineState | None:
        """The same if the replica had the push already, and only its commit was missing; None if not. It may be a part
        of the tensors, which belongs on the version before."""
        committed = Version.of(record)
        previous, version = self._fleet.previous, self._member.version
        if not committed.push_id or previous is None or version is None or not version.is_same(previous):
            return None
        upstream = self._upstream
        asked = weights_pb2.GetPushRequest(push_id=committed.push_id)
        try:
            known = await upstream.ask(upstream.weights.GetPush, asked, ASK_S)
        except PushNotFoundError:
            return None
        if known.push.state not in _WAITING:
            return None
        request = weights_pb2.CommitPushRequest(push_id=committed.push_id, fleet=record)
        return (await upstream.ask(upstream.weights.CommitPush, request, apply_s(request.apply))).state


async def _served(upstream: Upstream) -> Version:
    """What a replica serves now."""
    asked = weights_pb2.GetWeightsRequest(omit_manifest=True)
    weights = await upstream.ask(upstream.weights.GetWeights, asked, ASK_S)
    return Version.of(weights.state)


def _push_of(upstream: Upstream) -> str | None:
    return None if upstream.member.version is None else upstream.member.version.push_id
