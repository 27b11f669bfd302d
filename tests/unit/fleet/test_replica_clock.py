"""Leases of a replica whose wall clock is not that of the router."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from genserve.fleet.replica_clock import ReplicaClock
from genserve.v1 import types_pb2

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
    clock.told(at(NOW_S + ahead_s), NOW_S)
    assert ends_s(clock, NOW_S + ahead_s + 10) == pytest.approx(NOW_S + 10)


def test_a_lease_is_never_taken_to_end_before_it_does() -> None:
    """A report that was late says that the clock is behind; the next one does not take that back."""
    clock = ReplicaClock()
    for late_s in (0.1, 0.8, 0.0):
        clock.told(at(NOW_S), NOW_S + late_s)
    assert ends_s(clock, NOW_S + 10) == pytest.approx(NOW_S + 10.8)


def test_a_clock_that_is_set_counts_anew() -> None:
    """In either direction."""
    clock = ReplicaClock()
    for ahead_s in (0.0, 200.0, -50.0):
        clock.told(at(NOW_S + ahead_s), NOW_S)
        assert ends_s(clock, NOW_S + ahead_s + 10) == pytest.approx(NOW_S + 10)


def test_a_lease_without_an_end_has_none() -> None:
    """Whatever the clocks say."""
    clock = ReplicaClock()
    clock.told(at(NOW_S), NOW_S + 5)
    assert not clock.lease(types_pb2.PauseLease(lease_id="l")).HasField("expire_time")
