"""Sessions stay where they are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.policies.sessions import Sessions
from genserve.routing.replica import Request
from tests.unit.routing.fleets import UNTIMED, fleet, replica


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
