"""Policies that look at the load, at the turn or at the session."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.policies import MAX_CANDIDATES, KvCache, LeastRequests, Policy, PowerOfTwo, RoundRobin, Sessions
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


class Clock:
    """Seconds that a test counts."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def of(session_id: str) -> Request:
    """A request of a session."""
    return Request(session_id=session_id)


def test_a_session_stays_at_its_replica_whatever_the_load() -> None:
    """Its KV cache is there. Others, and requests without a session, are left to the next policy."""
    sessions = Sessions(Clock())
    assert sessions.order(of("s1"), fleet(0, 0)) == ()
    sessions.sent(of("s1"), replica(1))
    sessions.sent(of(""), replica(0))
    busy = fleet(0, 100)
    assert sessions.order(of("s1"), busy) == (busy[1],)
    assert sessions.order(of("s2"), busy) == ()
    assert sessions.order(of(""), busy) == ()


def test_session_leaves_a_forbidden_replica_and_stays_at_the_next() -> None:
    """It does not come back when the first may serve again: its KV cache is where it was served last."""
    sessions = Sessions(Clock())
    sessions.sent(of("s1"), replica(1))
    assert sessions.order(of("s1"), [replica(0)]) == ()
    sessions.sent(of("s1"), replica(0))
    assert sessions.order(of("s1"), [replica(0), replica(1)]) == (replica(0),)


def test_a_session_does_not_wait_for_a_replica_that_restarted() -> None:
    """The KV cache of its turns ended with the process."""
    sessions = Sessions(Clock())
    sessions.sent(of("s1"), replica(1))
    assert sessions.order(of("s1"), [replica(0), replace(replica(1), instance_id="another")]) == ()


def test_a_session_is_forgotten_when_it_is_not_used_for_its_time_to_live() -> None:
    """Each request begins it again."""
    clock = Clock()
    sessions = Sessions(clock, ttl_s=10.0)
    sessions.sent(of("s1"), replica(0))
    clock.now_s += 9.9
    assert sessions.order(of("s1"), fleet(0)) != ()
    sessions.sent(of("s1"), replica(0))
    clock.now_s += 9.9
    assert sessions.order(of("s1"), fleet(0)) != ()
    clock.now_s += 0.1
    assert sessions.order(of("s1"), fleet(0)) == ()


def test_forgotten_sessions_take_no_memory() -> None:
    """They go with the next request of any session."""
    clock = Clock()
    sessions = Sessions(clock, ttl_s=10.0)
    for number in range(100):
        clock.now_s += number == 50
        sessions.sent(of(f"s{number}"), replica(0))
    clock.now_s += 10.0
    sessions.sent(of("new"), replica(0))
    assert len(sessions) == 1


def test_a_full_table_forgets_the_session_that_was_used_longest_ago() -> None:
    """Not the one that began first."""
    sessions = Sessions(Clock(), max_sessions=2)
    for session_id in ("s1", "s2", "s1", "s3"):
        sessions.sent(of(session_id), replica(0))
    assert len(sessions) == 2
    assert [bool(sessions.order(of(each), fleet(0))) for each in ("s1", "s2", "s3")] == [True, False, True]


@UNTIMED
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.floats(0, 20)), max_size=40))
def test_the_table_is_right_about_the_sessions_that_it_remembers(sent: list[tuple[str, int, float]]) -> None:
    """Against all that was sent: the last replica of each session, unless that was too long ago or two others were used
    since."""
    clock = Clock()
    sessions, last = Sessions(clock, max_sessions=2, ttl_s=10.0), dict[str, tuple[int, float]]()
    for session_id, number, pause_s in sent:
        clock.now_s += pause_s
        last.pop(session_id, None)
        last[session_id] = (number, clock.now_s)
        sessions.sent(of(session_id), replica(number))
        assert len(sessions) <= 2
        for each in "abcd":
            is_known = each in [*last][-2:] and clock.now_s < last[each][1] + 10.0
            assert sessions.order(of(each), fleet(0, 0, 0, 0)) == ((replica(last[each][0]),) if is_known else ())


@pytest.mark.parametrize(("max_sessions", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_table_without_room_or_time_is_refused(max_sessions: int, ttl_s: float) -> None:
    """No session would stay. The least room and a short time are enough."""
    Sessions(Clock(), 1, 0.001)
    with pytest.raises(ValueError, match=r"max_sessions|ttl_s"):
        Sessions(Clock(), max_sessions, ttl_s)
