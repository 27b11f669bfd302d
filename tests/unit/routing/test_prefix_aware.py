"""Prompts follow their KV cache, within the bound on the load; the index remembers the latest prefixes."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.policies import MAX_CANDIDATES
from genserve.routing.prefix_aware import Match, PrefixAware, PrefixIndex
from genserve.routing.replica import Replica, Request
from tests.support.kept import kept
from tests.unit.routing.fleets import UNTIMED, asking, fleet, prompt, replica, with_inflight

PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda path: blocks("".join(path)))


def blocks(path: str) -> list[bytes]:
    """The hashes of a prompt whose blocks are these letters."""
    return [path[: end + 1].encode() for end in range(len(path))]


def test_the_longest_known_beginning_is_found() -> None:
    """With the replicas that it was sent to, latest first."""
    index = PrefixIndex()
    assert index.match(blocks("abc")) is None
    index.add(blocks("ab"), "one")
    index.add(blocks("abcd"), "two")
    index.add(blocks("ax"), "three")
    assert index.match(blocks("abcde")) == Match(("two",), True)
    assert index.match(blocks("aby")) == Match(("two", "one"), False)
    assert index.match(blocks("ay")) == Match(("three", "two", "one"), False)
    assert index.match(blocks("y")) is None
    assert index.match([]) is None


def test_index_separates_continued_prompts_from_those_that_begin_alike() -> None:
    """Samples and turns are of one kind, a system prompt of the other."""
    index = PrefixIndex()
    index.add(blocks("sys1"), "one")
    for path, is_whole in {"sys1": True, "sys1+": True, "sys2": False, "sys": True}.items():
        match = index.match(blocks(path))
        assert match is not None and match.is_whole is is_whole, path


def test_a_prefix_has_its_last_replicas_only() -> None:
    """A hot prefix is at every replica, and the index does not grow with their number."""
    index = PrefixIndex(max_holders=2)
    for instance_id in ("one", "two", "one", "three"):
        index.add(blocks("a"), instance_id)
    match = index.match(blocks("a"))
    assert match is not None and match.holders == ("three", "one")


def test_what_was_not_sent_for_longest_is_forgotten_from_its_end() -> None:
    """So that what remains of a prompt can still be found."""
    index = PrefixIndex(max_blocks=4)
    index.add(blocks("abc"), "one")
    index.add(blocks("xy"), "two")
    assert len(index) == 4
    assert index.match(blocks("abc")) == Match(("one",), False)
    assert index.match(blocks("xy")) == Match(("two",), True)
    index.add(blocks("abc"), "one")
    assert index.match(blocks("xy")) == Match(("two",), False)


@UNTIMED
@given(st.lists(st.tuples(PATHS, st.sampled_from(["one", "two", "three"])), max_size=12), PATHS)
def test_the_index_is_right_about_what_it_has_room_for(sent: list[tuple[list[bytes], str]], asked: list[bytes]) -> None:
    """Against all that was sent: the replicas of the longest beginning, and whether a prompt went on from it."""
    index = PrefixIndex(max_holders=3)
    for path, instance_id in sent:
        index.add(path, instance_id)
    known = [block for block in asked if any(block in path for path, _ in sent)]
    if not known:
        assert index.match(asked) is None
        return
    deepest = known[-1]
    holders = {instance_id for path, instance_id in sent if deepest in path}
    goes_on = any(deepest in path[:-1] for path, _ in sent)
    match = index.match(asked)
    assert match is not None
    assert set(match.holders) == holders and len(match.holders) == len(holders)
    assert match.is_whole is (deepest == asked[-1] or not goes_on)


@UNTIMED
@given(st.lists(PATHS, max_size=12), st.integers(1, 6))
def test_the_index_never_outgrows_its_bound(sent: list[list[bytes]], max_blocks: int) -> None:
    """Nor does what it remembers beside the replicas."""
    index = PrefixIndex(max_blocks=max_blocks)
    for path in sent:
        index.add(path, "one")
        assert len(index) <= max_blocks
        assert len({*kept(index, bytes)}) <= max_blocks


@pytest.mark.parametrize("bound", [{"max_blocks": 0}, {"max_holders": 0}])
def test_an_index_without_room_is_refused(bound: dict[str, int]) -> None:
    """It would know nothing. Room for one is enough."""
    PrefixIndex(max_blocks=1, max_holders=1).add(blocks("ab"), "one")
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(**bound)


SYSTEM = prompt(0, 4)


@pytest.fixture
def policy() -> PrefixAware:
    """A policy that knows no prompt, with the threshold 1.5."""
    return PrefixAware(PrefixIndex(), 1.5)


def test_a_new_prompt_is_left_to_the_next_policy(policy: PrefixAware) -> None:
    """And one without a whole block."""
    assert policy.order(asking(prompt(1, 4)), fleet(0, 0)) == ()
    policy.sent(asking([1]), replica(0))
    assert policy.order(asking([1]), fleet(0, 0)) == ()


def test_samples_and_turns_follow_their_prompt(policy: PrefixAware) -> None:
    """The repeated prompt, and the one with an answer and a question behind it."""
    replicas = fleet(0, 0, 0)
    policy.sent(asking(prompt(1, 4)), replicas[2])
    for again in (prompt(1, 4), prompt(1, 4) + prompt(2, 9)):
        assert policy.order(asking(again), replicas) == (replicas[2],)


def test_an_overloaded_replica_gets_no_more_samples(policy: PrefixAware) -> None:
    """Three others have 16 sequences each. With 29 and one more, 1.5 times the mean is 29.25; with 30 and one more,
    29.6. Both are rounded up to 30. Four more count as four."""
    policy.sent(asking(prompt(1, 4)), replica(0))
    for inflight, num_sequences, has_room in ((29, 1, True), (30, 1, False), (26, 4, True), (27, 4, False)):
        replicas = fleet(inflight, 16, 16, 16)
        found = policy.order(asking(prompt(1, 4), num_sequences=num_sequences), replicas)
        assert found == ((replicas[0],) if has_room else ()), (inflight, num_sequences)


def test_an_idle_fleet_has_room_for_the_samples_of_a_prompt(policy: PrefixAware) -> None:
    """An eighth of the replica's batch of 32, although the mean is far below."""
    policy.sent(asking(prompt(1, 4)), replica(0))
    assert policy.order(asking(prompt(1, 4)), fleet(3, 0, 0, 0)) != ()
    assert policy.order(asking(prompt(1, 4)), fleet(4, 0, 0, 0)) == ()


def test_a_prompt_that_only_begins_like_another_goes_there_up_to_the_mean(policy: PrefixAware) -> None:
    """A system prompt alone does not pile prompts up while a replica is idle."""
    policy.sent(asking(SYSTEM + prompt(1, 4)), replica(0))
    new = asking(SYSTEM + prompt(2, 4))
    assert policy.order(new, fleet(1, 1, 1)) == (replica(0, inflight=1),)
    assert policy.order(new, fleet(2, 1, 1)) == ()
    assert policy.order(new, fleet(1, 0, 0)) == ()


def test_of_several_holders_the_least_loaded_is_first(policy: PrefixAware) -> None:
    """The others are for when it cannot be reached."""
    replicas = fleet(5, 3, 4, 4, 9)
    for holder in replicas[:4]:
        policy.sent(asking(prompt(1, 4)), holder)
    found = policy.order(asking(prompt(1, 4)), replicas)
    assert [each.outstanding for each in found] == [3, 4, 4]
    assert len(found) == MAX_CANDIDATES


def test_a_replica_that_restarted_holds_nothing(policy: PrefixAware) -> None:
    """Its prefix cache ended with its process."""
    old = replica(0)
    policy.sent(asking(prompt(1, 4)), old)
    assert policy.order(asking(prompt(1, 4)), [old, replica(1)]) == (old,)
    assert policy.order(asking(prompt(1, 4)), [replace(old, instance_id="another"), replica(1)]) == ()


@UNTIMED
@given(st.integers(1, 12), st.integers(1, 12))
def test_a_replica_that_joins_or_leaves_moves_no_prompt_of_the_others(num_replicas: int, leaving: int) -> None:
    """Each of 40 prompts stays where it is, unless that is gone."""
    policy, replicas = PrefixAware(PrefixIndex()), fleet(*[0] * num_replicas)
    requests = [asking(prompt(seed, 2)) for seed in range(40)]
    homes = {request: replicas[index % num_replicas] for index, request in enumerate(requests)}
    for request, home in homes.items():
        policy.sent(request, home)
    gone = replicas[leaving % num_replicas]
    for after in ([*replicas, replica(99)], [each for each in replicas if each != gone]):
        for request, home in homes.items():
            assert policy.order(request, after) == ((home,) if home in after else ())


@UNTIMED
@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 4)), max_size=60),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.25, 2.0]),
)
def test_no_replica_is_loaded_above_the_bound(
    sent: list[tuple[int, bool, int]], num_replicas: int, threshold: float
) -> None:
    """For any prompts that do not end: every replica that is chosen has room, which is the threshold times the mean or
    the free share of its batch; where there is none, the least loaded takes it."""
    policy, replicas = PrefixAware(PrefixIndex(), threshold), fleet(*[0] * num_replicas)
    for seed, has_system_prompt, num_sequences in sent:
        token_ids = (SYSTEM if has_system_prompt else []) + prompt(1 + seed, 2)
        request = asking(token_ids, num_sequences=num_sequences)
        total = sum(each.inflight for each in replicas) + num_sequences
        bound = max(ceil(threshold * total / num_replicas), 32 // 8)
        candidates = policy.order(request, replicas)
        assert all(each.inflight + num_sequences <= bound for each in candidates)
        chosen = candidates[0] if candidates else min(replicas, key=lambda each: each.inflight)
        policy.sent(request, chosen)
        replicas = with_inflight(replicas, chosen, num_sequences)


def test_a_hot_prefix_comes_to_every_replica() -> None:
    """800 requests with one beginning and different ends, none of which ends: the load is even in the end."""
    policy, replicas = PrefixAware(PrefixIndex()), fleet(*[0] * 8)
    for seed in range(800):
        request = asking(SYSTEM + prompt(1 + seed, 1))
        replicas = with_inflight(replicas, _take(policy, request, replicas), 1)
    assert {each.inflight for each in replicas} == {100}


def _take(policy: PrefixAware, request: Request, replicas: list[Replica]) -> Replica:
    candidates = policy.order(request, replicas)
    chosen = candidates[0] if candidates else min(replicas, key=lambda each: each.inflight)
    policy.sent(request, chosen)
    return chosen


@pytest.mark.parametrize("threshold", [0.99, float("nan")])
def test_a_threshold_below_the_mean_is_refused(threshold: float) -> None:
    """Every replica would be overloaded."""
    with pytest.raises(ValueError, match="overload_threshold"):
        PrefixAware(PrefixIndex(), threshold)
