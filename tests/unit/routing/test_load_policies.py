"""Policies that look at the load, or at nothing: least requests, KV cache, two choices, round-robin."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.policies.kv_cache import KvCache
from genserve.routing.policies.least_requests import LeastRequests
from genserve.routing.policies.policy import MAX_CANDIDATES, Policy
from genserve.routing.policies.power_of_two import PowerOfTwo
from genserve.routing.policies.round_robin import RoundRobin
from genserve.routing.replica import Load, Replica, Request
from tests.unit.routing.fleets import UNTIMED, fleet, replica, with_inflight

ANY = Request()


@UNTIMED
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers())
def test_least_requests_orders_the_least_loaded(inflight: list[int], seed: int) -> None:
    """As a sort would, whoever is first among equals."""
    found = LeastRequests(Random(seed)).order(ANY, fleet(*inflight))
    assert [each.outstanding for each in found] == sorted(inflight)[:MAX_CANDIDATES]
    assert len(set(each.replica_id for each in found)) == len(found)


@UNTIMED
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8), st.integers())
def test_kv_cache_orders_those_with_most_room(usage: list[float], seed: int) -> None:
    """The number of sequences does not matter."""
    replicas = [
        replica(number, load=Load(running=number, kv_usage=each, inflight_at_report=7 * number), inflight=7 * number)
        for number, each in enumerate(usage)
    ]
    found = KvCache(Random(seed)).order(ANY, replicas)
    assert [each.load.kv_usage for each in found] == sorted(usage)[:MAX_CANDIDATES]


@pytest.mark.parametrize("policy", [LeastRequests, KvCache, PowerOfTwo])
def test_equals_are_chosen_equally_often(policy: type[LeastRequests | KvCache | PowerOfTwo]) -> None:
    """Senders that have the same reports, and nothing in flight, do not all choose the same replica."""
    assert _is_even(policy(Random(1)), fleet(0, 0, 0, 0))


@pytest.mark.parametrize("policy", [LeastRequests, KvCache])
@pytest.mark.parametrize("inflight", [(0, 0, 3, 4), (0, 3, 0, 4), (4, 0, 0, 3, 0)])
def test_equals_are_chosen_equally_often_beside_others(
    policy: type[LeastRequests | KvCache], inflight: tuple[int, ...]
) -> None:
    """However many they are, and wherever they stand."""
    assert _is_even(policy(Random(1)), fleet(*inflight))


def _is_even(policy: Policy, replicas: list[Replica]) -> bool:
    """Whether each of the least loaded, and nobody else, is chosen about as often as another."""
    equal = [each.replica_id for each in replicas if each.outstanding == 0]
    chosen = Counter(policy.order(ANY, replicas)[0].replica_id for _ in range(1000 * len(equal)))
    return set(chosen) == set(equal) and max(chosen.values()) < 1150


@pytest.mark.parametrize("policy", [LeastRequests, KvCache])
def test_a_burst_between_two_reports_is_spread(policy: type[LeastRequests | KvCache]) -> None:
    """64 requests that no replica has reported yet: what was sent is counted at once."""
    chooser, replicas = policy(Random(1)), fleet(*[0] * 8)
    for _ in range(64):
        replicas = with_inflight(replicas, chooser.order(ANY, replicas)[0], 1)
    assert {each.inflight for each in replicas} == {8}


@UNTIMED
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers())
def test_power_of_two_names_two_replicas_the_less_loaded_first(inflight: list[int], seed: int) -> None:
    """One of them if there is no other."""
    found = PowerOfTwo(Random(seed)).order(ANY, fleet(*inflight))
    assert len({each.replica_id for each in found}) == len(found) == min(2, len(inflight))
    assert [each.outstanding for each in found] == sorted(each.outstanding for each in found)


def test_power_of_two_never_chooses_the_most_loaded_and_chooses_all_others() -> None:
    """As each pair is as likely as another."""
    policy, replicas = PowerOfTwo(Random(1)), fleet(0, 1, 2, 3)
    chosen = Counter(policy.order(ANY, replicas)[0].outstanding for _ in range(6000))
    assert sorted(chosen) == [0, 1, 2]
    assert chosen[0] == pytest.approx(3000, rel=0.1)
    assert chosen[2] == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("policy", [LeastRequests, KvCache, PowerOfTwo])
def test_chance_is_the_generator_that_is_passed_in(policy: type[LeastRequests | KvCache | PowerOfTwo]) -> None:
    """The same seed gives the same choices."""

    def choices(seed: int) -> list[tuple[Replica, ...]]:
        chooser = policy(Random(seed))
        return [chooser.order(ANY, fleet(0, 0, 0, 1)) for _ in range(20)]

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_round_robin_goes_around_in_order_of_the_ids() -> None:
    """However the replicas are passed; the candidates after the first are those that follow it."""
    policy, replicas = RoundRobin(Random(1), "replica-003"), fleet(0, 0, 0, 0)
    orders = [policy.order(ANY, shuffled) for shuffled in (replicas, replicas[::-1], replicas, replicas, replicas)]
    ids = [[int(each.replica_id[-1]) for each in found] for found in orders]
    assert ids == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert [len(RoundRobin(Random(1)).order(ANY, fleet(*[0] * size))) for size in (1, 2, 3)] == [1, 2, 3]


def test_round_robin_goes_on_where_it_was_when_a_replica_leaves_or_joins() -> None:
    """Whose turn comes depends on whose turn it was."""
    policy = RoundRobin(Random(1), last_id="replica-001")
    assert policy.order(ANY, [replica(0), replica(1), replica(3)])[0] == replica(3)
    assert policy.order(ANY, [replica(0), replica(1), replica(3), replica(4)])[0] == replica(4)
    assert policy.order(ANY, [replica(1), replica(3)])[0] == replica(1)


def test_simultaneous_senders_begin_rounds_at_different_replicas() -> None:
    """Clients that send a request each would all send it to the first one."""
    first = Counter(RoundRobin(Random(seed)).order(ANY, fleet(0, 0, 0, 0))[0].replica_id for seed in range(400))
    assert len(first) == 4 and max(first.values()) < 150


@UNTIMED
@given(st.integers(1, 9), st.integers(0, 40))
def test_round_robin_gives_every_replica_as_many_turns(num_replicas: int, num_requests: int) -> None:
    """One more or less."""
    policy, replicas = RoundRobin(Random(num_requests)), fleet(*range(num_replicas))
    turns = Counter(policy.order(ANY, replicas)[0].replica_id for _ in range(num_requests))
    counts = [turns[each.replica_id] for each in replicas]
    assert max(counts) - min(counts) <= 1
