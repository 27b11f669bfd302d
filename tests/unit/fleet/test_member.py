"""What the router knows of one replica, and what follows from it."""

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from genserve.fleet.desired import Version
from genserve.fleet.member import Member, ReplicaClock
from genserve.routing.replica import Load, Replica, ReplicaState
from genserve.v1 import control_pb2, types_pb2

ONE = Version(1, "p")
INFO = control_pb2.GetServerInfoResponse(architecture="Tiny", vocab_size=9, dtype="bfloat16")
INFO.limits.max_num_seqs = 4


def engine(
    phase: types_pb2.Phase.ValueType = types_pb2.PHASE_RUNNING,
    version: Version = ONE,
    instance_id: str = "i",
    **more: Any,
) -> types_pb2.EngineState:
    """A state that a replica tells."""
    told = {"weight_version": version.number, "push_id": version.push_id, "content_digest": version.content_digest}
    return types_pb2.EngineState(instance_id=instance_id, phase=phase, base_digest=version.base_digest, **told, **more)


def serving(version: Version | None = ONE, phase: types_pb2.Phase.ValueType = types_pb2.PHASE_RUNNING) -> Member:
    """A replica that has told all of it."""
    member = Member("a:1")
    member.connected(INFO)
    member.reported(engine(phase, version or Version(0)), control_pb2.Load(running=2))
    if version is not None:
        member.serves(version)
    return member


def test_policies_know_an_adapter_as_soon_as_the_replica_has_told_it() -> None:
    """What they know of a replica is kept as long as nothing has changed."""
    member = Member("a:1")
    assert member.as_replica(ReplicaState.READY).lora_names is None
    member.has_loras(["poet"])
    assert member.as_replica(ReplicaState.READY).lora_names == frozenset(["poet"])


def test_a_replica_is_connecting_until_it_has_told_its_state() -> None:
    """And while its engine starts."""
    member = Member("a:1")
    assert member.where(ONE) == (ReplicaState.CONNECTING, "it has not answered yet")
    member.lost("it was not there")
    starting = engine(types_pb2.PHASE_STARTING)
    member.starts(starting)
    assert member.where(ONE) == (ReplicaState.CONNECTING, "its engine is starting")
    starting.startup.step = "loading weights"
    member.starts(starting)
    assert member.where(ONE) == (ReplicaState.CONNECTING, "its engine is starting: loading weights")


@pytest.mark.parametrize(
    ("phase", "state", "reason"),
    [
        (types_pb2.PHASE_RUNNING, ReplicaState.READY, ""),
        (types_pb2.PHASE_APPLYING, ReplicaState.READY, ""),
        (types_pb2.PHASE_PAUSED, ReplicaState.READY, ""),
        (types_pb2.PHASE_SLEEPING, ReplicaState.READY, ""),
        (types_pb2.PHASE_STARTING, ReplicaState.CONNECTING, "starting"),
        (types_pb2.PHASE_DRAINING, ReplicaState.DRAINING, "it is shutting down"),
        (types_pb2.PHASE_DEAD, ReplicaState.UNHEALTHY, "its engine is dead"),
        (types_pb2.PHASE_TAINTED, ReplicaState.SYNCING, "inconsistent"),
    ],
)
def test_the_phase_of_an_engine_decides(phase: types_pb2.Phase.ValueType, state: ReplicaState, reason: str) -> None:
    """Of one that serves the version of the fleet. One that is paused has its requests wait."""
    found, why = serving(phase=phase).where(ONE)
    assert found is state and reason in why and bool(why) == bool(reason)


@pytest.mark.parametrize(
    ("version", "committed", "reason"),
    [
        (None, ONE, "its version is being read"),
        (None, None, "its version is being read"),
        (ONE, None, "the fleet starts"),
        (Version(0), ONE, "it serves version 0, the fleet 1"),
        (Version(2, "q"), ONE, "it serves version 2, the fleet 1"),
        (Version(1, "q"), ONE, "it serves other weights under version 1: push 'q'"),
        (Version(1, "q", "d"), Version(1, "p", "e"), "it serves other weights under version 1: push 'q'"),
        (Version(1, "q", "d"), Version(1, "p", "d"), ""),
        (Version(1, "p", "d"), Version(1, "p", "e"), ""),
        (Version(1), Version(1), ""),
    ],
)
def test_only_the_version_of_the_fleet_gets_requests(
    version: Version | None, committed: Version | None, reason: str
) -> None:
    """The same number is not enough: the push, or the digest of its contents, has to be the same."""
    expected = ReplicaState.SYNCING if reason else ReplicaState.READY
    assert serving(version).where(committed) == (expected, reason)


def test_a_failed_sync_is_told_until_the_replica_serves_something_else() -> None:
    """In place of what is different."""
    member = serving(Version(0))
    member.sync_failure = "no room"
    assert member.where(ONE) == (ReplicaState.SYNCING, "no room")
    member.serves(ONE)
    assert (member.where(ONE), member.sync_failure) == ((ReplicaState.READY, ""), "")


def test_what_counts_most_is_told_first() -> None:
    """Removed, then unhealthy, then drained, then not paused."""
    member = serving()
    member.holds_leases = False
    assert member.where(ONE)[0] is ReplicaState.SYNCING
    member.is_draining = True
    assert member.where(ONE) == (ReplicaState.DRAINING, "it is being drained")
    member.lost("gone away")
    assert member.where(ONE) == (ReplicaState.UNHEALTHY, "gone away")
    member.is_gone = True
    assert member.where(ONE) == (ReplicaState.GONE, "it was removed")


def test_what_is_lost_is_not_known_any_more() -> None:
    """It may be back as another process, with other weights."""
    member = serving()
    member.has_loras(["poet"])
    member.lost("gone away")
    assert (member.version, member.engine, member.load, member.lora_names) == (None, None, None, None)
    member.connected(INFO)
    assert member.where(ONE)[0] is ReplicaState.CONNECTING


def test_a_loss_is_known_when_it_is_back() -> None:
    """What was asked before may have been answered by a run that has gone."""
    member = serving()
    before = member.num_losses
    assert not member.was_lost_since(before)
    member.lost("gone")
    member.connected(INFO)
    assert member.was_lost_since(before) and not member.was_lost_since(member.num_losses)
    member.is_gone = True
    assert member.was_lost_since(member.num_losses)


@pytest.mark.parametrize(
    ("version", "instance_id"),
    [(Version(2, "p"), "i"), (Version(1, "q"), "i"), (Version(1, "p", "d"), "i"), (ONE, "j")],
)
def test_a_version_has_to_be_read_again_when_a_report_differs(version: Version, instance_id: str) -> None:
    """By what it serves, whatever its number, or by who reports; the same report changes nothing."""
    member = serving()
    member.reported(engine(), control_pb2.Load())
    assert member.version == ONE
    member.sync_failure = "no room"
    member.reported(engine(version=version, instance_id=instance_id), control_pb2.Load())
    assert member.version is None
    assert member.sync_failure == ("" if instance_id == "j" else "no room")


def test_a_report_from_before_a_commit_leaves_the_version() -> None:
    """It was on its way meanwhile: the replica would get no requests until it has been asked what it serves."""
    member = serving()
    member.serves(Version(2, "q"))
    member.keeps(types_pb2.FleetState(epoch=2, weight_version=2, push_id="q"))
    member.reported(engine(version=ONE, fleet_epoch=1), control_pb2.Load())
    assert member.version == Version(2, "q")
    member.reported(engine(version=ONE, fleet_epoch=2), control_pb2.Load())  # somebody has brought it back
    assert member.version is None


def test_newest_record_counts_in_whatever_order_answers_come() -> None:
    """Or the replica would be taken to serve what somebody has pushed to it alone."""
    member = serving(Version(2, "q"))
    member.keeps(types_pb2.FleetState(epoch=2, weight_version=2, push_id="q"))
    member.keeps(types_pb2.FleetState(epoch=1, weight_version=1, push_id="p"))
    assert not member.changed_by_others
    member.serves(Version(3, "r"))
    assert member.changed_by_others


def test_a_push_that_was_being_committed_was_not_pushed_to_one_replica_alone() -> None:
    """Its router could not write down what came of it: the replica is brought to the version of the fleet."""
    member = serving(Version(2, "q"))
    member.keeps(types_pb2.FleetState(epoch=1, weight_version=1, push_id="p", undecided_push_id="q"))
    assert not member.changed_by_others
    member.serves(Version(3, "r"))
    assert member.changed_by_others


def test_policies_see_all_that_a_replica_told_and_what_was_sent_since() -> None:
    """After each event, though what they see is made anew only then."""
    seen: list[Replica] = []

    def see(state: ReplicaState = ReplicaState.READY) -> Replica:
        seen.append(member.as_replica(state))
        assert member.as_replica(state) is seen[-1]
        return seen[-1]

    member, most = Member("a:1"), 1 << 30
    assert see() == Replica("a:1", "a:1", "", ReplicaState.READY, 0, most, Load(), 0, None)
    member.connected(INFO)
    assert see() == Replica("a:1", "a:1", "", ReplicaState.READY, 0, 4, Load(), 0, None)
    member.sent(3)
    assert see().inflight == 3
    told = control_pb2.Load(running=5, waiting=6, kv_usage=0.5, tokens_per_second=8.0)
    member.reported(engine(), told)
    load = Load(5, 6, 0.5, 8.0, 3)
    assert see() == Replica("a:1", "a:1", "i", ReplicaState.READY, 0, 4, load, 3, None)
    member.ended(1)
    member.serves(ONE)
    member.has_loras(["poet"])
    assert see() == Replica("a:1", "a:1", "i", ReplicaState.READY, 1, 4, load, 2, frozenset(["poet"]))
    for event in (lambda: member.ended(1), lambda: member.serves(Version(2)), lambda: member.has_loras([])):
        event()
        assert see() != seen[-2]
    assert see(ReplicaState.SYNCING).state is ReplicaState.SYNCING
    member.lost("gone away")
    assert see() == Replica("a:1", "a:1", "", ReplicaState.READY, 0, 4, Load(), 1, None)


@pytest.mark.parametrize(("told", "expected"), [(0, 1), (1, 1), (7, 7)])
def test_a_replica_has_room_for_one_at_least(told: int, expected: int) -> None:
    """Policies divide by it."""
    info = control_pb2.GetServerInfoResponse()
    info.limits.max_num_seqs = told
    member = Member("a:1")
    member.connected(info)
    assert member.max_num_seqs == expected


def test_the_kind_of_a_replica_is_told_in_words() -> None:
    """All replicas have to have it in common."""
    assert str(serving().kind) == "Tiny of 9 tokens in bfloat16"


NOW_S = 1_000_000.0


def at(unix_s: float) -> Timestamp:
    """A time for the wire."""
    time = Timestamp()
    time.FromNanoseconds(round(unix_s * 1e9))
    return time


def ends_s(clock: ReplicaClock, expire_s: float) -> float:
    """When a lease that ends there at `expire_s` ends by the router's clock."""
    return clock.lease(types_pb2.PauseLease(expire_time=at(expire_s))).expire_time.ToNanoseconds() / 1e9


@pytest.mark.parametrize("ahead_s", [-300.0, 0.0, 300.0])
def test_a_lease_has_as_much_time_left_as_the_replica_says(ahead_s: float) -> None:
    """Also if the clock of its host is minutes ahead, or behind."""
    clock = ReplicaClock()
    assert ends_s(clock, NOW_S + 10) == NOW_S + 10, "it has told no time"
    clock.reported(at(NOW_S + ahead_s), NOW_S)
    assert ends_s(clock, NOW_S + ahead_s + 10) == pytest.approx(NOW_S + 10)


def test_a_lease_is_never_taken_to_end_before_it_does() -> None:
    """A report that was late says that the clock is behind; the next one does not take that back."""
    clock = ReplicaClock()
    for late_s in (0.1, 0.8, 0.0):
        clock.reported(at(NOW_S), NOW_S + late_s)
    assert ends_s(clock, NOW_S + 10) == pytest.approx(NOW_S + 10.8)


def test_a_clock_that_is_set_counts_anew() -> None:
    """In either direction."""
    clock = ReplicaClock()
    for ahead_s in (0.0, 200.0, -50.0):
        clock.reported(at(NOW_S + ahead_s), NOW_S)
        assert ends_s(clock, NOW_S + ahead_s + 10) == pytest.approx(NOW_S + 10)


def test_a_lease_without_an_end_has_none() -> None:
    """Whatever the clocks say."""
    clock = ReplicaClock()
    clock.reported(at(NOW_S), NOW_S + 5)
    assert not clock.lease(types_pb2.PauseLease(lease_id="l")).HasField("expire_time")
