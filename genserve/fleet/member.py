"""The router's knowledge of one replica, its clock included, and conclusions from it. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp

from genserve.fleet.desired import Version
from genserve.routing.replica import Load, Replica, ReplicaState
from genserve.v1 import control_pb2, types_pb2, weights_pb2

_JUMP_S = 1.0


class ReplicaClock:
    """The wall clock of a replica, which may differ by minutes from that of the router: by the times in its status."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def reported(self, time: Timestamp, now_s: float) -> None:
        """It has reported its time, which has arrived here at `now_s`, Unix seconds.

        How long that took is not known: of several times the one is kept by which a lease ends last, so that none is
        taken to be over too early, until the clock of one of both is set."""
        ahead_s = time.ToNanoseconds() / 1e9 - now_s
        if self._ahead_s is None or not self._ahead_s <= ahead_s <= self._ahead_s + _JUMP_S:
            self._ahead_s = ahead_s

    def lease(self, lease: types_pb2.PauseLease) -> types_pb2.PauseLease:
        """A lease of the replica, which ends at a time of this host."""
        if self._ahead_s is None or not lease.HasField("expire_time"):
            return lease
        own = types_pb2.PauseLease()
        own.CopyFrom(lease)
        own.expire_time.FromNanoseconds(max(0, lease.expire_time.ToNanoseconds() - round(self._ahead_s * 1e9)))
        return own


_PUSHED = "push "
"""How the source of an adapter begins that was pushed."""
_MAX_NUM_SEQS = 1 << 30
"""Of a replica that has not reported it yet."""
_NOT_TOLD = "\uffff"
"""After all ids of runs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Facts that are the same for all replicas of a fleet."""

    architecture: str
    vocab_size: int
    dtype: str

    @classmethod
    def of(cls, info: control_pb2.GetServerInfoResponse) -> Self:
        """As a replica reports it."""
        return cls(info.architecture, info.vocab_size, info.dtype)

    def __str__(self) -> str:
        return f"{self.architecture} of {self.vocab_size} tokens in {self.dtype}"


@dataclass(slots=True)
class Member:
    """A replica. `address` names it.

    `joins`: somebody has added it to this fleet: what it knows of a fleet is of another one. `failure`: why it is taken
    to be unhealthy, "" = it answers. `kind`: as it last told, None before. `clock`: by which its leases end. `engine`,
    `load` and `lora_names`: the same, and None while it does not answer. `takes_loras`: whether it may have adapters.
    `pushed_loras`: the pushes that have brought those that were pushed, by their names; `missing_loras`: the same of
    those that it lacks; `lora_sources`: where all have come from, as far as it has told. `pushes`: those in flight
    there, as it last told. `record`: what it keeps of its fleet, as it last told or was told; None = nothing.
    `is_written`: this router has told it one; `is_forgetful`: it has another one since it was last connected to.
    `is_being_brought`: the router brings it a version, which may be live already while the engine is yet to go on.
    `is_held`: it was looked after by another router when it was last asked. `brought_beside`: the addresses of the
    replicas that answered when it changed to the version that it serves, None = nobody has seen that. `instance_id`: of
    the run that told last; it stays when that does not answer any more, so that another run at this address can be told
    from it. `version`: what it serves, None while that is not known. `sync_failure`: why it could not be brought to the
    version of the fleet, "" = it was not tried, or is being tried. `is_draining`: somebody drains it. `is_given_up`: by
    force, though nobody else may have the version of the fleet. `is_let_go`: its daemon shuts down, and was told that
    it need not wait for others. `is_gone`: it was removed. `num_losses`: how often it was lost. `holds_leases`: whether
    it is paused where the fleet is; `has_foreign_lease`: whether it is where another fleet was. `inflight`: sequences
    that were sent to it by this router and have not ended.
    """

    address: str
    joins: bool = False
    failure: str = ""
    kind: Kind | None = None
    max_num_seqs: int = _MAX_NUM_SEQS
    max_active_requests: int = 0
    engine: types_pb2.EngineState | None = None
    clock: ReplicaClock = field(default_factory=ReplicaClock)
    instance_id: str = ""
    load: control_pb2.Load | None = None
    pushes: Sequence[weights_pb2.PushInFlight] = ()
    version: Version | None = None
    record: types_pb2.FleetState | None = None
    is_written: bool = False
    is_forgetful: bool = False
    is_being_brought: bool = False
    is_held: bool = False
    brought_beside: frozenset[str] | None = None
    sync_failure: str = ""
    lora_names: frozenset[str] | None = None
    pushed_loras: Mapping[str, str] = field(default_factory=dict)
    lora_sources: Mapping[str, str] = field(default_factory=dict)
    takes_loras: bool = False
    missing_loras: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False
    is_given_up: bool = False
    is_let_go: bool = False
    is_gone: bool = False
    num_losses: int = 0
    holds_leases: bool = True
    has_foreign_lease: bool = False
    inflight: int = 0
    _known_version: Version | None = None
    _inflight_at_report: int = 0
    _routed: Replica | None = field(default=None, repr=False)
    _routed_state: ReplicaState = ReplicaState.CONNECTING

    def was_lost_since(self, num_losses: int) -> bool:
        """Whether it was lost or removed since it had been lost so often. It may be back."""
        return self.is_gone or self.num_losses != num_losses

    def connected(self, info: control_pb2.GetServerInfoResponse) -> None:
        """It has reported what it serves."""
        self.kind = Kind.of(info)
        record = info.fleet if info.HasField("fleet") else None
        self.is_forgetful = self.is_written and record != self.record
        self.record = record
        self.max_num_seqs = max(1, info.limits.max_num_seqs)
        self.max_active_requests = info.limits.max_active_requests
        self.takes_loras = "lora" in info.features
        self.failure = ""
        self._changed()

    def found_held(self, info: control_pb2.GetServerInfoResponse) -> None:
        """It has reported what it serves, and that another router looks after it."""
        self.instance_id = info.state.instance_id
        self.record = info.fleet if info.HasField("fleet") else None

    @property
    def precedence(self) -> tuple[int, str]:
        """Of two routers of which each has a part of the fleet, the one goes on that has the replica for which this is
        the smallest: it knows the latest record. Both see the same."""
        return -(self.record.epoch if self.record is not None else 0), self.instance_id or _NOT_TOLD

    def starts(self, engine: types_pb2.EngineState) -> None:
        """It answers, and has no engine yet."""
        self.failure = ""
        self.engine = engine
        self.instance_id = engine.instance_id
        self._changed()

    def reported(
        self,
        engine: types_pb2.EngineState,
        load: control_pb2.Load,
        pushes: Sequence[weights_pb2.PushInFlight] = (),
    ) -> None:
        """It has reported its state, load and pushes. What it serves is not known any more if that has changed since it
        was known."""
        before = self.engine
        if before is None or before.instance_id != engine.instance_id:
            self.version = None
            self.sync_failure = ""
            self.is_let_go = False
        elif self.version != Version.of(engine) and not self.is_outdated(engine):
            self.version = None
        self.engine, self.load, self.pushes = engine, load, pushes
        self.instance_id = engine.instance_id
        self._inflight_at_report = self.inflight
        self._changed()

    def is_outdated(self, engine: types_pb2.EngineState) -> bool:
        """Whether it was in this state before it confirmed the record that it keeps, whose epoch never falls: a report
        is still on its way when a commit has been answered, for example."""
        return self.record is not None and engine.fleet_epoch < self.record.epoch

    @property
    def is_unread(self) -> bool:
        """Whether it answers, and is just being asked what it serves or which adapters it has."""
        return self.version_is_unread or self.loras_are_unread

    @property
    def version_is_unread(self) -> bool:
        """Whether it answers, and is just being asked what it serves."""
        return self._has_started and self.version is None

    @property
    def loras_are_unread(self) -> bool:
        """Whether it answers, and is just being asked which adapters it has."""
        return self._has_started and self.takes_loras and self.lora_names is None

    @property
    def _has_started(self) -> bool:
        return self.engine is not None and self.engine.phase != types_pb2.PHASE_STARTING

    def serves(self, version: Version, beside: frozenset[str] | None = None) -> None:
        """What it serves is known. `beside`: see `brought_beside`."""
        if version != self._known_version:
            self.brought_beside = None if self._known_version is None else beside
        self.version = self._known_version = version
        self.sync_failure = ""
        self._changed()

    def keeps(self, record: types_pb2.FleetState) -> None:
        """It has the record of the fleet, and keeps it."""
        self.is_written = True
        self.is_forgetful = False
        if self.record is None or self.record.epoch <= record.epoch:
            self.record = record

    @property
    def changed_by_others(self) -> bool:
        """Whether it serves something else than what was written down when its fleet brought it something, or was about
        to: somebody has pushed to it, and not to the fleet."""
        record, version = self.record, self.version
        if record is None or version is None or version.is_same(Version.of(record)):
            return False
        return not version.push_id or version.push_id != record.undecided_push_id

    def is_ahead_of(self, committed: Version) -> bool:
        """Whether somebody has brought a newer version to this replica alone."""
        return self.changed_by_others and self.version is not None and self.version.number > committed.number

    def doubt(self) -> None:
        """The router has to ask what the replica serves."""
        self.version = None
        self._changed()

    def reported_loras(self, loras: Iterable[control_pb2.Lora]) -> None:
        """It has reported its adapters: all of them."""
        told = {lora.lora_name: lora.source for lora in loras}
        pushed = {name: source.removeprefix(_PUSHED) for name, source in told.items() if source.startswith(_PUSHED)}
        self.has_loras(told, pushed)
        self.lora_sources = told

    def has_loras(self, lora_names: Iterable[str], pushed: Mapping[str, str] = MappingProxyType({})) -> None:
        """These are its adapters, of which pushes have brought some."""
        self.lora_names, self.pushed_loras, self.lora_sources = frozenset(lora_names), pushed, {}
        self._changed()

    def lacks_lora_of(self, lora_name: str, path: str) -> bool:
        """Whether it has reported that it does not have the adapter of a directory, but none or another one."""
        if self.lora_names is None:
            return False
        source = self.lora_sources.get(lora_name)
        return lora_name not in self.lora_names or (source is not None and source != str(PurePosixPath(path)))

    def unloaded_lora(self, lora_name: str) -> None:
        """It has unloaded this adapter, and reports that a while later."""
        if self.lora_names is not None:
            pushed = {name: push_id for name, push_id in self.pushed_loras.items() if name != lora_name}
            self.has_loras(self.lora_names - {lora_name}, pushed)

    def lacks_loras(self, push_ids: Mapping[str, str]) -> None:
        """Of the adapters that were pushed to the fleet it lacks these, or has others under their names."""
        if push_ids != self.missing_loras:
            self.missing_loras = push_ids
            self._changed()

    @property
    def _routed_loras(self) -> frozenset[str] | None:
        """The adapters that requests may name here; None = unknown, of a replica that has none."""
        if self.lora_names is None:
            return frozenset() if self.takes_loras else None
        return self.lora_names - self.missing_loras.keys()

    def lost(self, failure: str) -> None:
        """It does not answer, or answers that it is not healthy."""
        self.failure = failure
        self.num_losses += 1
        self.version = None
        self.engine = None
        self.load = None
        self.pushes = ()
        self.lora_names = None
        self.pushed_loras = {}
        self.lora_sources = {}
        self._changed()

    def sent(self, num_sequences: int) -> None:
        """A request was sent to it."""
        self.inflight += num_sequences
        self._changed()

    def ended(self, num_sequences: int) -> None:
        """A request that was sent to it has ended."""
        self.inflight -= num_sequences
        self._changed()

    def where(
        self, committed: Version | None, may_sleep: Collection[frozenset[str]] | None = None
    ) -> tuple[ReplicaState, str]:
        """Its state in a fleet that has committed this version, None = it is not known yet, and where one of these
        collections of parts sleeps, None = any; and why it is not READY."""
        if self.is_gone:
            return ReplicaState.GONE, "it was removed"
        if self.failure:
            return ReplicaState.UNHEALTHY, self.failure
        engine = self.engine
        if engine is None:
            return ReplicaState.CONNECTING, "it has not answered yet"
        if self.is_draining or engine.phase == types_pb2.PHASE_DRAINING:
            return ReplicaState.DRAINING, "it is being drained" if self.is_draining else "it is shutting down"
        if engine.phase == types_pb2.PHASE_STARTING:
            step = engine.startup.step
            return ReplicaState.CONNECTING, f"its engine is starting{f': {step}' if step else ''}"
        return self._where(engine, committed, may_sleep)

    def _where(
        self, engine: types_pb2.EngineState, committed: Version | None, may_sleep: Collection[frozenset[str]] | None
    ) -> tuple[ReplicaState, str]:
        if engine.phase == types_pb2.PHASE_DEAD:
            return ReplicaState.UNHEALTHY, "its engine is dead"
        if committed is None or self.version is None:
            return ReplicaState.SYNCING, "its version is being read" if self.version is None else "the fleet starts"
        if engine.phase == types_pb2.PHASE_TAINTED:
            return ReplicaState.SYNCING, self.sync_failure or "its weights may be inconsistent after a failed commit"
        if not self.version.is_same(committed):
            difference = _difference(self.version, committed, is_ahead=self.is_ahead_of(committed))
            return ReplicaState.SYNCING, self.sync_failure or difference
        if self.is_being_brought:  # it refuses pushes until it has answered
            return ReplicaState.SYNCING, f"it is being brought to version {committed.number}"
        if not self.holds_leases:
            return ReplicaState.SYNCING, "it is being paused, as the fleet is"
        if self.has_foreign_lease:
            return ReplicaState.SYNCING, "it is being resumed: another fleet has paused it"
        if holder := next((f"{lease.holder!r}" for lease in engine.pauses if not lease.fleet_lease_id), ""):
            command = f"genserve resume --force --target {self.address}"
            return ReplicaState.SYNCING, f"it is paused by {holder}, and the fleet is not: {command}"
        if may_sleep is not None and frozenset(engine.asleep_tags) not in may_sleep:
            why = "it is put to sleep, as the fleet is" if all(may_sleep) else "it is woken up: the fleet is awake"
            return ReplicaState.SYNCING, self.sync_failure or why
        return ReplicaState.READY, ""

    def as_replica(self, state: ReplicaState) -> Replica:
        """The replica as policies see it. Made anew only after a change."""
        if self._routed is None or self._routed_state is not state:
            load = self.load
            self._routed = Replica(
                self.address,
                self.address,
                self.engine.instance_id if self.engine is not None else "",
                state,
                self.version.number if self.version is not None else 0,
                self.max_num_seqs,
                Load()
                if load is None
                else Load(load.running, load.waiting, load.kv_usage, load.tokens_per_second, self._inflight_at_report),
                self.inflight,
                self._routed_loras,
            )
            self._routed_state = state
        return self._routed

    def _changed(self) -> None:
        self._routed = None


def _difference(version: Version, committed: Version, *, is_ahead: bool) -> str:
    if version.is_checkpoint and committed.is_checkpoint:
        return "it has started with another checkpoint than the fleet: start it with the same one, or push a version"
    if version.number == committed.number:
        return f"it serves other weights under version {version.number}: push {version.push_id!r}"
    text = f"it serves version {version.number}, the fleet {committed.number}"
    return f"{text}: somebody has pushed to it alone, and it waits for a newer one" if is_ahead else text
