"""What a router takes its fleet to be. The replicas are told by the test; nothing is called."""

import asyncio
import random
import time

from genserve.errors import DeadlineError
from genserve.fleet.config import FleetSettings
from genserve.fleet.desired import Version
from genserve.fleet.fleet import Fleet
from genserve.fleet.leases import new_lease_id
from genserve.fleet.member import Member
from genserve.fleet.pauses import FleetPauses
from genserve.fleet.upstream import Upstream
from genserve.routing.names import make_chain, parse_policies
from genserve.security.caller import Caller
from genserve.v1 import control_pb2, types_pb2
from genserve.wire.conversions import duration_of
from tests.support.clocks import leaping_clock
from tests.support.patience import turns
from tests.support.refusals import refuses

LEASE = "1" * 32
PAUSED = types_pb2.PauseLease(lease_id="own", holder="trainer", fleet_lease_id=LEASE)


async def replica_of(fleet: Fleet, address: str, *, joins: bool = False) -> Upstream:
    """A replica that has told that it is paused, serves its checkpoint, and keeps no record."""
    upstream = Upstream(Member(address, joins=joins), Caller())
    fleet.add(upstream)
    upstream.member.connected(control_pb2.GetServerInfoResponse())
    state = types_pb2.EngineState(instance_id=address, phase=types_pb2.PHASE_PAUSED, pauses=[PAUSED])
    upstream.member.reported(state, control_pb2.Load())
    fleet.leases.reported(address, [PAUSED])
    upstream.member.serves(Version(0))
    return upstream


def fleet_of_nobody() -> Fleet:
    """A router has just started."""
    return Fleet(FleetSettings(), make_chain(parse_policies("requests"), random.Random(0), time.monotonic))


async def test_a_lease_outlives_the_last_record_of_its_fleet() -> None:
    """A replica that was behind when it was paused keeps no record. The one that had the version is gone."""
    fleet = fleet_of_nobody()
    upstream = await replica_of(fleet, "127.0.0.1:1")
    fleet.settle()
    assert [lease.lease_id for lease in fleet.leases.active] == [LEASE]
    await upstream.close()


async def test_a_lease_of_a_replica_that_joins_is_of_another_fleet() -> None:
    """Also where nothing is written down."""
    fleet = fleet_of_nobody()
    upstreams = [await replica_of(fleet, "127.0.0.1:1", joins=True), Upstream(Member("127.0.0.1:2"), Caller())]
    fleet.add(upstreams[1])
    fleet.settle()
    assert fleet.leases.active == []
    for upstream in upstreams:
        await upstream.close()


async def test_a_replica_that_joins_does_not_say_what_a_fleet_serves() -> None:
    """Where nothing is written down: the newest version of the others counts."""
    fleet = fleet_of_nobody()
    upstreams = [await replica_of(fleet, "127.0.0.1:1", joins=True), await replica_of(fleet, "127.0.0.1:2")]
    upstreams[0].member.serves(Version(7, "of another fleet"))
    fleet.settle()
    assert fleet.committed == Version(0)
    for upstream in upstreams:
        await upstream.close()


async def test_a_repeated_commit_leaves_what_was_served_before() -> None:
    """All its answers were lost the first time, and what the replicas report decides once more."""
    fleet = fleet_of_nobody()
    upstream = await replica_of(fleet, "127.0.0.1:1")
    fleet.settle()
    for _ in range(2):
        fleet.begin_commit(fleet.record_with(Version(1, "push")), [upstream])
        fleet.serves(upstream, Version(1, "push"))
    assert (fleet.previous, fleet.committed) == (Version(0), Version(1, "push"))
    await upstream.close()


async def test_a_repeated_commit_leaves_the_epoch_of_its_record() -> None:
    """All replicas keep that record: a fleet that names an older one would never tell the next who joins the same."""
    fleet = fleet_of_nobody()
    version = Version(1, "push")
    fleet.commit(version)
    repeated = fleet.record_with(version)
    fleet.begin_commit(repeated, ())
    fleet.confirm(version, repeated.epoch)
    assert fleet.desired.epoch == repeated.epoch


async def test_an_answer_about_another_version_confirms_no_epoch() -> None:
    """What the fleet serves has another record, or an older answer came late."""
    fleet = fleet_of_nobody()
    version = Version(1, "push")
    fleet.commit(version)
    epoch = fleet.desired.epoch
    fleet.confirm(Version(1, "another"), epoch + 1)
    fleet.confirm(version, epoch - 1)
    assert fleet.desired.epoch == epoch


async def test_a_pause_does_not_wait_for_another_one_of_its_lease_for_ever() -> None:
    """It has the time that its caller gives it, and that of an answer."""
    fleet = fleet_of_nobody()
    async with fleet.lease_turns.taken(new_lease_id("r")):
        with leaping_clock(), refuses(DeadlineError, says="610 s"):
            await FleetPauses(fleet).pause(control_pb2.PauseRequest(request_id="r", timeout=duration_of(600)))


async def of_commit(undecided_push_id: str, serves: Version) -> tuple[Fleet, Upstream]:
    """The router of before has written something down while it committed a push, and has ended. A new one has found the
    only replica."""
    fleet = fleet_of_nobody()
    upstream = await replica_of(fleet, "127.0.0.1:1")
    upstream.member.record = types_pb2.FleetState(
        epoch=7, weight_version=1, push_id="before", undecided_push_id=undecided_push_id
    )
    upstream.member.serves(serves)
    fleet.settle()
    return fleet, upstream


async def test_a_push_that_was_being_committed_counts_where_it_is_served() -> None:
    """Or nobody would have the version of the fleet any more, which the replica served before."""
    fleet, upstream = await of_commit("pushed", Version(2, "pushed"))
    assert fleet.committed == Version(2, "pushed")
    await upstream.close()


async def test_a_newer_record_is_believed_after_a_push_of_before_was_decided() -> None:
    """Of a replica that was away when the router started, and has seen what came after that push."""
    fleet, upstream = await of_commit("pushed", Version(2, "pushed"))
    late = await replica_of(fleet, "127.0.0.1:2")
    late.member.doubt()
    fleet.found(late, types_pb2.FleetState(epoch=9, weight_version=3, push_id="newer"))
    fleet.serves(late, Version(3, "newer"))
    assert fleet.committed == Version(3, "newer")
    record = fleet.record()
    assert record is not None and not record.undecided_push_id
    await upstream.close()
    await late.close()


async def test_a_push_that_was_being_committed_may_come_to_count_later() -> None:
    """The replica was still at it when the router of before ended; until then this is written down again."""
    fleet, upstream = await of_commit("pushed", Version(1, "before"))
    assert fleet.committed == Version(1, "before")
    record = fleet.record()
    assert record is not None and record.undecided_push_id == "pushed"
    fleet.serves(upstream, Version(2, "pushed"))
    assert fleet.committed == Version(2, "pushed")
    await upstream.close()


async def test_a_push_to_a_replica_alone_does_not_count_where_nobody_commits_it() -> None:
    """Its version is not that of the fleet."""
    fleet, upstream = await of_commit("", Version(2, "pushed"))
    assert fleet.committed == Version(1, "before")
    await upstream.close()


async def test_a_replica_decides_that_keeps_the_record_of_the_push_itself() -> None:
    """Its link broke when it had committed: it missed the later record, in which the push is only named."""
    fleet = fleet_of_nobody()
    first, second = [await replica_of(fleet, f"127.0.0.1:{port}") for port in (1, 2)]
    first.member.record = types_pb2.FleetState(epoch=7, weight_version=2, push_id="pushed")
    first.member.serves(Version(2, "pushed"))
    before = types_pb2.FleetState(epoch=8, weight_version=1, push_id="before", undecided_push_id="pushed")
    second.member.record = before
    second.member.serves(Version(1, "before"))
    fleet.settle()
    assert fleet.committed == Version(2, "pushed")
    for upstream in first, second:
        await upstream.close()


async def test_a_record_from_before_the_commit_does_not_decide() -> None:
    """The push was applied once, and replaced; its repeat was being committed when the router ended. A replica that was
    away all the while still serves it."""
    fleet = fleet_of_nobody()
    away, other = [await replica_of(fleet, f"127.0.0.1:{port}") for port in (1, 2)]
    away.member.doubt()
    other.member.record = types_pb2.FleetState(
        epoch=8, weight_version=2, push_id="next", undecided_push_id="repeated", undecided_epoch=7
    )
    other.member.serves(Version(2, "next"))
    fleet.settle()
    fleet.found(away, types_pb2.FleetState(epoch=5, weight_version=1, push_id="repeated"))
    fleet.serves(away, Version(1, "repeated"))
    assert fleet.committed == Version(2, "next")
    for upstream in away, other:
        await upstream.close()


async def test_a_replica_decides_also_if_its_record_is_read_after_its_version() -> None:
    """It ends its commit while the router asks."""
    fleet, upstream = await of_commit("", Version(1, "before"))
    other = await replica_of(fleet, "127.0.0.1:2")
    naming = types_pb2.FleetState(epoch=9, weight_version=1, push_id="before")
    naming.undecided_push_id, naming.undecided_epoch = "pushed", 8
    fleet.found(other, naming)
    fleet.serves(upstream, Version(2, "pushed"))
    assert fleet.committed == Version(1, "before")
    fleet.found(upstream, types_pb2.FleetState(epoch=8, weight_version=2, push_id="pushed"))
    assert fleet.committed == Version(2, "pushed")
    for each in upstream, other:
        await each.close()


async def test_a_commit_is_given_up_when_another_router_came_after_it() -> None:
    """Which has pushed something else, while this one reached no replica."""
    fleet, upstream = await of_commit("", Version(1, "before"))
    other = await replica_of(fleet, "127.0.0.1:2")
    other.member.serves(Version(1, "before"))
    other.member.is_written = True
    fleet.begin_commit(fleet.record_with(Version(2, "pushed")), [upstream, other])
    later = types_pb2.FleetState(epoch=2 * fleet.desired.issued, weight_version=3, push_id="of the other router")
    fleet.found(other, later)
    fleet.serves(upstream, Version(2, "pushed"))
    record = fleet.record()
    assert fleet.committed == Version.of(later) and record is not None and not record.undecided_push_id
    for each in upstream, other:
        await each.close()


async def test_a_replica_that_is_behind_does_not_decide_by_its_record() -> None:
    """It was asked to commit as well, and something was written down meanwhile. Those that get requests may refuse."""
    fleet = fleet_of_nobody()
    ready, behind = [await replica_of(fleet, f"127.0.0.1:{port}") for port in (1, 2)]
    fleet.settle()
    fleet.begin_commit(fleet.record_with(Version(1, "pushed")), [ready])
    fleet.changed()
    record = fleet.record()
    assert record is not None and record.undecided_push_id == "pushed"
    behind.member.keeps(record)
    fleet.serves(behind, Version(1, "pushed"))
    assert fleet.committed == Version(0)
    for upstream in ready, behind:
        await upstream.close()


async def test_a_commit_goes_on_when_a_late_replica_has_a_later_record() -> None:
    """Of the router before. What that says is kept, and written down with the push: its epoch was issued before."""
    fleet, upstream = await of_commit("", Version(1, "before"))
    late = await replica_of(fleet, "127.0.0.1:2")
    committing = fleet.record_with(Version(2, "pushed"))
    fleet.begin_commit(committing, [upstream])
    path = types_pb2.FleetLora(lora_name="poet", path="/poet")
    fleet.found(late, types_pb2.FleetState(epoch=9, weight_version=1, push_id="before", loras=[path]))
    upstream.member.doubt()
    fleet.serves(upstream, Version(2, "pushed"))
    record = fleet.record()
    assert fleet.committed == Version(2, "pushed") and record is not None
    assert list(record.loras) == [path] and record.epoch > committing.epoch
    for each in upstream, late:
        await each.close()


async def test_a_record_says_which_push_is_being_committed() -> None:
    """Until a replica serves it."""
    fleet = fleet_of_nobody()
    upstream = await replica_of(fleet, "127.0.0.1:1")
    fleet.settle()
    fleet.begin_commit(fleet.record_with(Version(1, "pushed")), [upstream])
    fleet.changed()
    record = fleet.record()
    assert record is not None and (record.push_id, record.undecided_push_id) == ("", "pushed")
    fleet.serves(upstream, Version(1, "pushed"))
    record = fleet.record()
    assert record is not None and (record.push_id, record.undecided_push_id) == ("pushed", "")
    await upstream.close()


async def test_whoever_waits_is_told_a_version_that_leaves_the_state_as_it_is() -> None:
    """A drain, for example, of a replica that is DRAINING before and after."""
    fleet = fleet_of_nobody()
    upstream = await replica_of(fleet, "127.0.0.1:1")
    fleet.settle()
    upstream.member.is_draining = True
    fleet.doubt(upstream)
    changed = fleet.states_changed.next
    fleet.serves(upstream, Version(0))
    assert changed.is_set()
    await upstream.close()


async def test_a_replica_that_is_lost_meanwhile_is_not_waited_for() -> None:
    """Though it is back, and is read again: two that are lost by turns would be waited for without an end."""
    fleet = fleet_of_nobody()
    upstreams = [await replica_of(fleet, "127.0.0.1:1"), await replica_of(fleet, "127.0.0.1:2")]
    for upstream in upstreams:
        upstream.member.doubt()
    reading = asyncio.create_task(fleet.until_read())
    await turns()
    state = types_pb2.EngineState(instance_id="again", phase=types_pb2.PHASE_RUNNING)
    fleet.lost(upstreams[0], "it is silent")
    upstreams[0].member.reported(state, control_pb2.Load())
    await turns()
    assert upstreams[0].member.is_unread and not reading.done()
    fleet.lost(upstreams[1], "it is silent")
    await reading
    for upstream in upstreams:
        await upstream.close()
