"""The replicas of a router, where a request goes, and which version and record of the fleet hold."""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from genserve.errors import NoReplicaError
from genserve.fleet.config import FleetSettings
from genserve.fleet.desired import Desired, FleetSleep, Version, newest
from genserve.fleet.leases import Leases
from genserve.fleet.member import Member
from genserve.fleet.turns import Turns
from genserve.fleet.undecided import Undecided
from genserve.fleet.upstream import Upstream
from genserve.forward.destinations import ANY_REQUEST, Destinations
from genserve.routing.chain import Chain, with_reasons
from genserve.routing.replica import Replica, ReplicaState, Request
from genserve.v1 import types_pb2

log = logging.getLogger(__name__)


class Fleet(Destinations[Upstream]):
    """The table of replicas. A caller that changes a member then calls `refresh`, which wakes waiters.

    `committed`: the version that the fleet serves, None until it is known; `previous`: the one before, if this router
    has seen it. `desired`: what else it should be. `router`: this one, as replicas know it. `states_changed`: the state
    of a replica, or the committed version, has changed. `none_ready_since_s`: Unix time, None while a replica is ready.
    """

    def __init__(self, settings: FleetSettings, chain: Chain) -> None:
        super().__init__(chain)
        self.settings = settings
        self.committed: Version | None = None
        self.previous: Version | None = None
        self.router = types_pb2.Router(router_id=uuid.uuid4().hex)
        self.desired = Desired(time.time(), mark=int(self.router.router_id[:4], 16))
        self._undecided: Undecided | None = None
        self.leases = Leases()
        self.lease_turns = Turns()
        self.lora_turns = Turns()
        self._upstreams: dict[str, Upstream] = {}
        self._where: dict[str, tuple[ReplicaState, str]] = {}
        self.none_ready_since_s: float | None = time.time()

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
        """Removes a replica, and ends its calls. Its connection is to be closed by the caller that opened it."""
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

    def commit(self, version: Version, epoch: int = 0) -> None:
        """From now on requests go only to replicas that serve this version. `epoch`: the one that was issued for it, if
        one was."""
        self._now_serves(version)
        self._undecided = None
        self.desired.change(epoch)
        self.refresh()

    def _now_serves(self, version: Version) -> None:
        if self.committed is None or not self.committed.is_same(version):  # a commit may be repeated
            self.previous, self.committed = self.committed, version

    def confirm(self, version: Version, epoch: int) -> None:
        """A replica that had committed before keeps a record of this epoch now: an answer was lost, and the commit was
        repeated."""
        if self.committed is not None and self.committed.is_same(version) and self.desired.epoch < epoch:
            self._undecided = None
            self.desired.change(epoch)
        self.refresh()

    def begin_commit(self, record: types_pb2.FleetState, deciding: Iterable[Upstream]) -> None:
        """Replicas are asked to commit a push, and to keep this record of the fleet with it: see Undecided."""
        addresses = frozenset(upstream.address for upstream in deciding)
        self._undecided = Undecided(record.push_id, record.epoch, True, addresses)

    def is_undecided(self, push_id: str) -> bool:
        """Whether a commit of this push was begun, may yet come about, and is the last one."""
        return self._undecided is not None and self._undecided.push_id == push_id

    def has_served(self, push_id: str) -> bool:
        """Whether this router knows that the fleet serves a push, or has served it before."""
        return any(each is not None and each.push_id == push_id for each in (self.committed, self.previous))

    def end_commit(self) -> None:
        """Nothing comes of the last commit that is not known: no replica decides any more."""
        self._undecided = None

    def serves(self, upstream: Upstream, version: Version, beside: Iterable[Upstream] = ()) -> None:
        """A replica has reported what it serves. `beside`: the replicas that answered when it was asked."""
        upstream.member.serves(version, frozenset(each.address for each in (*beside, *self.answering)))
        self._decide(upstream)
        self.refresh(upstream)
        self.states_changed.notify()  # somebody may wait for its version though its state is the same

    def _decide(self, upstream: Upstream) -> None:
        undecided, version = self._undecided, upstream.member.version
        if undecided is None or version is None or not undecided.is_decided_by(upstream.member):
            return
        if undecided.is_own:
            self.commit(version, undecided.epoch)
        else:  # what a replica that is away has seen since is to be believed
            self._now_serves(version)
            self.refresh()

    def record(self) -> types_pb2.FleetState | None:
        """The record for the replicas; None while the version is not known."""
        if self.committed is None:
            return None
        record = self.desired.record(self.desired.epoch, self.committed, self.leases.to_write())
        if self._undecided is not None:
            record.undecided_push_id, record.undecided_epoch = self._undecided.push_id, self._undecided.epoch
        return record

    def record_with(self, version: Version) -> types_pb2.FleetState:
        """The same once a version is committed that may yet fail."""
        return self.desired.record(self.desired.issue(), version, self.leases.to_write())

    async def until_known(self) -> None:
        """To be called before anything is changed: waits until it is known what the fleet should be, which takes
        --settle at most. Raises NoReplicaError if no replica answers."""
        while self.committed is None:
            changed = self.states_changed.next
            if not self.answering:
                raise self.none_ready()
            await changed.wait()

    async def until_read(self) -> None:
        """Waits until it is known what the replicas have that answer. One that does not tell it in time is lost."""
        unread = [(member, member.num_losses) for member in self.members if member.is_unread]
        while any(member.is_unread and not member.was_lost_since(num_losses) for member, num_losses in unread):
            await self.states_changed.wait()

    def changed(self) -> None:
        """Leases, sleep or adapters of the fleet have changed: replicas are to get the new record."""
        if self.committed is not None:
            self.desired.change()
        self.refresh()

    @contextmanager
    def changing_sleep(self, change: Callable[[FleetSleep], FleetSleep]) -> Iterator[None]:
        """While replicas fall asleep or wake up one by one. If that fails, those that differ are as the fleet was."""
        desired = self.desired
        try:
            with desired.changing_sleep(change(desired.asleep)):
                yield
                desired.asleep = change(desired.asleep)  # another change may have ended meanwhile
        finally:
            self.refresh()

    def forget_lora(self, lora_name: str) -> None:
        """An adapter is not to be brought to replicas that lack it any more."""
        known = [each.pop(lora_name, None) for each in (self.desired.loras, self.desired.pushed_loras)]
        if any(each is not None for each in known):
            self.changed()

    def found(self, upstream: Upstream, record: types_pb2.FleetState) -> None:
        """A replica has reported its record of the fleet. What is newer is believed while this router has changed
        nothing, unless the replica joins: it was away when this router started. Otherwise it is believed only where
        this router has written before: another one has come after it, and gone."""
        upstream.member.record = record
        if self.committed is None or self.desired.knows(record.epoch):
            self._decide(upstream)
            return
        if upstream.member.is_written or not (self.desired.is_own or upstream.member.joins):
            self._adopt(record)
            return
        log.warning(
            "replica %s tells of another fleet, or of older changes: it is brought to this fleet", upstream.address
        )
        upstream.member.record = None
        self.desired.overtake(record.epoch)
        self.refresh()

    def _adopt(self, record: types_pb2.FleetState) -> None:
        log.info("the fleet serves version %d, as was written down (epoch %d)", record.weight_version, record.epoch)
        self.desired.adopt(record)
        self.leases.adopt(lease.lease_id for lease in record.leases)
        self.leases.expect(lease for lease in record.leases if self.leases.known(lease.lease_id) is None)
        self._now_serves(Version.of(record))
        undecided = self._undecided
        if undecided is None or not undecided.is_own or undecided.epoch < record.epoch:  # or it goes on
            named = record.undecided_push_id
            self._undecided = Undecided(named, record.undecided_epoch) if named else None
        for upstream in self._upstreams.values():
            self._decide(upstream)
        self.refresh()

    def doubt(self, upstream: Upstream) -> None:
        """A replica serves older weights than it was known for. It is out of rotation until it has reported its
        version."""
        upstream.member.doubt()
        self.refresh(upstream)

    def settle(self) -> None:
        """Finds out what the fleet should be: what was written down last, or if no record is left, what the
        replicas serve."""
        if self.committed is not None:
            return
        members = [each for each in self.members if not each.joins] or self.members
        records = [each.record for each in members if each.record is not None and each.version is not None]
        versions = [each.version for each in members if each.version is not None]
        if records:
            # Of those of an epoch, one that a daemon has read from its disk says least.
            self._adopt(max(records, key=lambda record: (record.epoch, record.ByteSize())))
        elif (
            found := newest(versions or (each.version for each in self.members if each.version is not None))
        ) is not None:
            log.info("the fleet serves version %d", found.number)
            # One that was behind when it was paused has no record, and may be all that is left of the fleet.
            pauses = [pause for each in members if each.engine is not None for pause in each.engine.pauses]
            self.leases.adopt(pause.fleet_lease_id for pause in pauses if pause.fleet_lease_id)
            self.desired.begin()
            self.committed = found
            self.refresh()

    def follow(self, *, waits: bool = True) -> bool:
        """If no replica has the version of the fleet any more, and all replicas serve the same one instead, that is the
        version of the fleet: somebody has brought it to each of them, as vLLM's own weight transfer does. Those that
        were away when the last of them got it have no say; but it `waits` for them, and returns True."""
        answering = [each.member for each in self.answering]
        first = answering[0].version if answering else None
        if self.committed is None or first is None or first.is_same(self.committed):
            return False
        # One that the previous router began is followed: whoever would have decided may be gone.
        if self._undecided is not None and self._undecided.is_own and first.push_id == self._undecided.push_id:
            return False
        if any(each.version is None or not each.version.is_same(first) for each in answering):
            return False
        # Where nothing was written down since its start, a version above that of the start was brought by somebody.
        if not all(each.changed_by_others or (each.record is None and first.number > 0) for each in answering):
            return False
        away = self._upstreams.keys() - {each.address for each in answering}
        if away and all(each.brought_beside is None or away & each.brought_beside for each in answering):
            return False
        if away and waits:
            return True
        log.info("all replicas serve version %d, which nobody has pushed through this router", first.number)
        self.commit(first)
        return False

    def refresh(self, upstream: Upstream | None = None) -> None:
        """Wakes waiters if the state of a replica has changed. Without `upstream` checks all replicas, because the
        committed version or the leases of the fleet have changed."""
        if self.committed is not None:
            self.newest_version = max(self.newest_version, self.committed.number)
        changed = False
        for each in self._upstreams.values() if upstream is None else (upstream,):
            if self._upstreams.get(each.address) is each:
                changed = self._refreshed(each) or changed
        if changed or upstream is None:
            if self.ready:
                self.none_ready_since_s = None
            elif self.none_ready_since_s is None:
                self.none_ready_since_s = time.time()
            self.states_changed.notify()

    def _refreshed(self, upstream: Upstream) -> bool:
        member = upstream.member
        member.holds_leases = not self.leases.missing(member.address)
        member.has_foreign_lease = self.leases.has_foreign(member.address)
        member.lacks_loras(self._without_lora(member))
        where = member.where(self.committed, self.desired.may_sleep)
        before = self._where.get(member.address)
        if where == before:
            return False
        self._where[member.address] = where
        if before is None or where[0] is not before[0]:
            state, reason = where
            log.info("replica %s is %s%s", member.address, state.value, f": {reason}" if reason else "")
        return True

    def _without_lora(self, member: Member) -> dict[str, str]:
        """The adapters that a replica lacks of those that were pushed, or of which it has another one."""
        wanted = self.desired.loras_to_bring
        if not wanted or member.lora_names is None:
            return {}
        there = {push_id for each in self.members for push_id in each.pushed_loras.values()}
        return {
            name: push_id
            for name, push_id in wanted.items()
            # Another one under the name is better than none, if no replica has it any more.
            if member.pushed_loras.get(name) != push_id and (push_id in there or name not in member.lora_names)
        }

    @property
    def wait_ready_s(self) -> float:
        """How long a request waits for a replica that may serve it."""
        return self.settings.wait_ready_s

    @property
    def committed_version(self) -> int | None:
        """The number of the version that the fleet serves, None until it is known."""
        return None if self.committed is None else self.committed.number

    def lives(self, instance_id: str, address: str) -> bool:
        """Whether a run of a daemon is there: one that is not reached is not."""
        upstream = self._upstreams.get(address)
        return upstream is not None and upstream.instance_id == instance_id

    def upstream_at(self, address: str) -> Upstream:
        """The replica of this address."""
        return self._upstreams[address]

    def replicas(self) -> list[Replica]:
        """The replicas as policies see them."""
        where = self._where
        return [upstream.member.as_replica(where[address][0]) for address, upstream in self._upstreams.items()]

    def why_none(self, request: Request = ANY_REQUEST) -> str:
        """Also what each replica does instead."""
        return with_reasons(
            super().why_none(request), {address: reason for address, (_, reason) in self._where.items()}
        )

    def none_ready(self) -> NoReplicaError:
        """The error for a call that no replica can serve now."""
        return NoReplicaError(self.why_none(), retry_after_s=1.0)

    def _sent(self, upstream: Upstream, num_sequences: int) -> Replica:
        member = upstream.member
        known = member.as_replica(self.where(member)[0])
        member.sent(num_sequences)
        return known

    def _ended(self, upstream: Upstream, num_sequences: int) -> None:
        member = upstream.member
        member.ended(num_sequences)
        if member.is_draining and not member.inflight:
            self.states_changed.notify()
