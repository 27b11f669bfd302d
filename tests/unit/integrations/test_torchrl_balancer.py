"""torchrl's LoadBalancer on replicas as a router reports them."""

from dataclasses import replace

import pytest

from genserve.client.fleet import FleetReplica, Replicas
from genserve.client.state import EngineState, Load
from genserve.errors import NoReplicaError
from genserve.integrations.torchrl_balancer import LoadBalancer
from genserve.v1 import fleet_pb2
from tests.support.refusals import refuses

VERSION = 3


class ListedFleet:
    """Four idle replicas at the version of the fleet."""

    def __init__(self) -> None:
        self.listed = [self.replica(f"10.0.0.{number}:1") for number in range(4)]

    def replica(self, address: str) -> FleetReplica:
        """One whose instance is named after its address."""
        engine = EngineState(f"instance of {address}", VERSION, "running", [], 0, 0)
        return FleetReplica(address, "ready", "", engine, Load(0, 0, 0.0, 0.0, 0.0), 0, 8, "", "")

    def report(self, index: int, running: int, inflight: int = 0) -> None:
        """What a replica says it runs, of which the router has sent so many."""
        load = Load(running, 0, 0.0, 0.0, 0.0)
        self.listed[index] = replace(self.listed[index], load=load, inflight=inflight)

    def replicas(self) -> Replicas:
        return Replicas(self.listed, VERSION, {}, fleet_pb2.ListReplicasResponse())


@pytest.fixture
def fleet() -> ListedFleet:
    return ListedFleet()


@pytest.mark.parametrize("prompt", [list(range(20)), "once upon a time there was a fleet of four"])
def test_a_prompt_follows_its_beginning(fleet: ListedFleet, prompt: str | list[int]) -> None:
    """As long as the replica has room; then it goes where there is."""
    balancer = LoadBalancer(fleet)
    first = balancer.select_actor(prompt)
    assert {balancer.select_actor(prompt) for _ in range(8)} == {first}
    fleet.report(first, running=9)
    assert balancer.select_actor(prompt) != first


def test_a_beginning_counts_from_the_prefix_length_on(fleet: ListedFleet) -> None:
    """With fewer tokens in common two prompts are strangers: the next strategy decides."""
    balancer = LoadBalancer(fleet, ["prefix-aware", "round-robin"], prefix_length=4)
    for prompt in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]):
        balancer.select_actor(prompt)
    assert balancer.get_stats()["decisions"] == {"prefix-aware": 1, "round-robin": 3}


def test_a_request_is_counted_once_whether_reported_or_not(fleet: ListedFleet) -> None:
    """Of the router's own requests those of the report are a part."""
    for index, (running, inflight) in enumerate([(5, 5), (0, 2), (3, 0), (1, 4)]):
        fleet.report(index, running, inflight)
    balancer = LoadBalancer(fleet, "requests")
    assert [each["pending_requests"] for each in balancer.get_stats()["actor_stats"]] == [5, 2, 3, 4]
    assert balancer.select_actor() == 1


def test_only_replicas_at_the_version_of_the_fleet_are_selected(fleet: ListedFleet) -> None:
    """And ready ones; if there are none the error says what they do."""
    balancer = LoadBalancer(fleet, "round-robin")
    for index in (0, 1):
        fleet.listed[index] = replace(fleet.listed[index], state="syncing")
    engine = fleet.listed[2].engine
    assert engine is not None
    fleet.listed[2] = replace(fleet.listed[2], engine=replace(engine, weight_version=VERSION - 1))
    assert {balancer.select_actor() for _ in range(4)} == {3}
    fleet.listed[3] = replace(fleet.listed[3], state="connecting", engine=None, load=None, max_num_seqs=0)
    with refuses(NoReplicaError, says="1 at version 2, 1 connecting, 2 syncing"):
        balancer.select_actor()


def test_what_follows_a_strategy_that_decides_is_kept_but_not_asked(fleet: ListedFleet) -> None:
    """torchrl accepts it: there a strategy can fail."""
    balancer = LoadBalancer(fleet, ["prefix-aware", "requests", "round-robin"])
    assert balancer.strategies == ["prefix-aware", "requests", "round-robin"]
    assert list(balancer.get_stats()["decisions"]) == ["prefix-aware", "requests"]
    assert list(LoadBalancer(fleet, "prefix-aware").get_stats()["decisions"]) == ["prefix-aware", "requests"]
    with pytest.raises(ValueError, match="prefix_length"):
        LoadBalancer(fleet, prefix_length=0)
