"""What the router knows of one replica."""

from genserve.fleet.member import Member
from genserve.routing.replica import ReplicaState


def test_policies_know_an_adapter_as_soon_as_the_replica_has_told_it() -> None:
    """What they know of a replica is kept as long as nothing has changed."""
    member = Member("a:1")
    assert member.as_replica(ReplicaState.READY).lora_names is None
    member.has_loras(["poet"])
    assert member.as_replica(ReplicaState.READY).lora_names == frozenset(["poet"])
