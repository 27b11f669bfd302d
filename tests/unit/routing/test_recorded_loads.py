"""Policies against each other on the recorded loads: `compare` prints the figures behind each margin."""

from collections.abc import Callable
from functools import cache

import pytest

from genserve.routing.names import DEFAULT_POLICIES, DIRECT_POLICIES
from genserve.routing.prefix_aware import OVERLOAD_THRESHOLD
from tests.unit.routing.compared import COMPARED
from tests.unit.routing.fleet_model import Figures, replay
from tests.unit.routing.recorded_loads import LOADS, RecordedLoad, agents, grpo, hot_prefix

Load = Callable[[], RecordedLoad]


@cache
def figures(load: Load, name: str, num_senders: int = 1, report_s: float = 1.0) -> Figures:
    """What a chain makes of a load, at eight replicas."""
    return replay(load(), COMPARED[name], num_senders=num_senders, report_s=report_s)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "margin"), [(grpo, 0.4), (agents, 0.25), (hot_prefix, 0.015)])
def test_prefix_aware_hits_the_cache_more_than_prompt_blind_policies(load: Load, margin: float) -> None:
    """A hot prefix comes into every cache soon, whoever routes: there the margin is that of the other prefixes."""
    for other in ("round-robin", "requests"):
        assert figures(load, "prefix-aware").hit_rate > figures(load, other).hit_rate + margin


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_prefix_aware_keeps_the_load_within_its_bound(load: Load) -> None:
    """No replica has more than the overload threshold times the mean of the sequences, over the whole load."""
    assert figures(load, "prefix-aware").imbalance < OVERLOAD_THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_prefix_aware_makes_nobody_wait_much_longer_than_round_robin_does(load: Load) -> None:
    """A quarter and 0.1 s at most: another seed of the policy's chance makes a difference of that size."""
    assert figures(load, "prefix-aware").p99_wait_s < 1.25 * figures(load, "round-robin").p99_wait_s + 0.1
    assert figures(agents, "prefix-aware").p99_wait_s < 0.75 * figures(agents, "round-robin").p99_wait_s


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_an_index_of_what_was_sent_is_better_than_a_hash_ring(load: Load) -> None:
    """Why genserve has the index. The hash of a whole prompt is another one after each turn, and finds no common
    beginning; the hash of its first blocks sends all prompts with one beginning to one place and is without balance."""
    kept = figures(load, "prefix-aware")
    assert kept.hit_rate > figures(load, "hash ring, whole prompt").hit_rate
    first_blocks = figures(load, "hash ring, 16 blocks")
    assert kept.imbalance < first_blocks.imbalance - 0.4
    assert kept.hit_rate > first_blocks.hit_rate - 0.02


@pytest.mark.parametrize("load", LOADS)
def test_prefix_aware_is_better_than_the_balancer_of_torchrl(load: Load) -> None:
    """Balance on every load, and hits where prompts have more in common than their beginning."""
    kept, other = figures(load, "prefix-aware"), figures(load, "torchrl's default")
    assert kept.imbalance < other.imbalance - 0.4
    assert kept.hit_rate > other.hit_rate + (0.3 if load is not hot_prefix else -0.025)


def test_a_hot_prefix_spills_over_to_every_replica() -> None:
    """Four of five requests have it, and each replica serves about as many requests as another."""
    found = figures(hot_prefix, "prefix-aware")
    mean = sum(found.num_served) / len(found.num_served)
    assert all(0.75 * mean < each < 1.25 * mean for each in found.num_served)
    assert found.num_decided["requests"] > 0 and found.num_decided["prefix-aware"] > found.num_decided["requests"]


def test_sessions_find_all_that_their_turns_before_have_cached() -> None:
    """More than the index, which may move a session for the balance's sake."""
    found = figures(agents, DEFAULT_POLICIES)
    num_first_turns = len(agents().conversations)
    assert found.num_decided["session"] == sum(found.num_served) - num_first_turns
    assert found.hit_rate >= figures(agents, "prefix-aware").hit_rate
    assert found.p99_wait_s <= figures(agents, "prefix-aware").p99_wait_s


@pytest.mark.slow
def test_two_choices_keep_senders_with_late_reports_off_one_replica() -> None:
    """Each of 16 senders takes the replica that reports last for idle. Two random choices avoid that."""
    for report_s in (1.0, 0.25):
        late = figures(grpo, "requests", num_senders=16, report_s=report_s)
        assert figures(grpo, "power-of-two", num_senders=16, report_s=report_s).imbalance < late.imbalance - 0.5


def test_many_senders_with_frequent_reports_keep_the_load_within_the_bound() -> None:
    """With the hits of one router that knows of every request."""
    direct = figures(grpo, DIRECT_POLICIES, num_senders=16, report_s=0.25)
    assert direct.imbalance < OVERLOAD_THRESHOLD
    assert direct.hit_rate > figures(grpo, DEFAULT_POLICIES).hit_rate - 0.02


def test_samples_of_a_prompt_stay_together_with_many_senders() -> None:
    """One worker sends all of them, and its own index is enough for that."""
    assert figures(grpo, DIRECT_POLICIES, num_senders=16).hit_rate > figures(grpo, "round-robin").hit_rate + 0.4


@pytest.mark.slow
def test_a_load_is_the_same_in_every_run() -> None:
    """Or the margins would mean nothing. Its tokens are those of a seed."""
    for load in LOADS:
        turns = [turn for conversation in load().conversations for turn in conversation.turns]
        again = load.__wrapped__()  # type: ignore[attr-defined]
        assert turns == [turn for conversation in again.conversations for turn in conversation.turns]
    first = replay(grpo(), COMPARED["power-of-two"])
    assert first == replay(grpo(), COMPARED["power-of-two"])
