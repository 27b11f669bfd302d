"""What a client knows of one replica."""

from genserve.client.direct.replica import KnownReplica
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2, fleet_pb2, types_pb2

READY = fleet_pb2.REPLICA_STATE_READY


def told(
    state: fleet_pb2.ReplicaState.ValueType = READY, instance_id: str = "i", version: int = 0, running: int = 0
) -> fleet_pb2.Replica:
    """What a router says of it."""
    engine = types_pb2.EngineState(instance_id=instance_id, weight_version=version)
    return fleet_pb2.Replica(
        address="a:1", state=state, reason="why", engine=engine, load=control_pb2.Load(running=running), max_num_seqs=4
    )


def known() -> KnownReplica:
    """One that was told and reached."""
    replica = KnownReplica("a:1")
    replica.tell(told(), 0)
    replica.reach("i")
    return replica


def test_it_is_ready_when_the_router_says_so_and_the_client_has_reached_it() -> None:
    """The same run of the daemon."""
    replica = KnownReplica("a:1")
    assert replica.where[0] is ReplicaState.CONNECTING
    replica.tell(told(), 0)
    assert replica.where == (ReplicaState.CONNECTING, "this client has not reached it yet")
    replica.reach("other")
    assert replica.where[0] is ReplicaState.CONNECTING
    replica.reach("i")
    assert replica.where == (ReplicaState.READY, "")
    replica.tell(told(instance_id="j"), 0)
    assert replica.where[0] is ReplicaState.CONNECTING and not replica.is_reached


def test_what_the_router_says_counts_first() -> None:
    """Each of its states, and one that this version does not know."""
    replica = known()
    for state, expected in (
        (fleet_pb2.REPLICA_STATE_SYNCING, ReplicaState.SYNCING),
        (fleet_pb2.REPLICA_STATE_DRAINING, ReplicaState.DRAINING),
        (fleet_pb2.REPLICA_STATE_UNHEALTHY, ReplicaState.UNHEALTHY),
        (fleet_pb2.REPLICA_STATE_CONNECTING, ReplicaState.CONNECTING),
        (99, ReplicaState.CONNECTING),
    ):
        replica.tell(told(state), 0)  # type: ignore[arg-type]
        assert replica.where == (expected, "why")
        assert replica.as_replica().state is expected
    replica.tell(told(), 0)
    assert replica.where[0] is ReplicaState.READY
    replica.leave()
    assert replica.where[0] is ReplicaState.GONE and replica.as_replica().state is ReplicaState.GONE


def test_a_failure_lasts_until_it_answers_or_is_another_one() -> None:
    """One that cannot be reached at all stays so."""
    replica = known()
    replica.miss("refused")
    assert replica.where == (ReplicaState.UNHEALTHY, "refused")
    replica.tell(told(), 0)
    assert replica.where == (ReplicaState.UNHEALTHY, "refused")
    replica.tell(told(instance_id="j"), 0)
    assert replica.where[0] is ReplicaState.CONNECTING
    replica.miss("refused")
    replica.reach("j")
    assert replica.where[0] is ReplicaState.READY
    elsewhere = KnownReplica("a:1", "another network")
    elsewhere.tell(told(), 0)
    assert elsewhere.where == (ReplicaState.UNHEALTHY, "another network")


def test_a_ready_one_serves_the_version_of_the_fleet() -> None:
    """The report of its engine may be older than its commit; of others it is all that is known."""
    replica = known()
    replica.tell(told(version=2), 3)
    assert replica.as_replica().weight_version == 3
    replica.tell(told(fleet_pb2.REPLICA_STATE_SYNCING, version=2), 3)
    assert replica.as_replica().weight_version == 2


def test_a_report_that_is_told_twice_counts_once() -> None:
    """What the client has sent since the report is not in it."""
    replica = known()
    replica.count(3)
    replica.tell(told(running=5), 0)
    assert replica.as_replica().outstanding == 5  # 3 of this client, 2 of others
    replica.count(-2)
    replica.tell(told(running=5), 0)
    assert replica.as_replica().outstanding == 3
    replica.tell(told(running=4), 0)
    assert replica.as_replica().outstanding == 4
