"""Calls per second."""

from genserve.security.rate import Rate


def test_a_second_has_as_many_calls_as_the_rate_says() -> None:
    rate = Rate(2.0)
    assert [rate.take(10.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert rate.take(10.4) > 0.0
    assert rate.take(10.5) == 0.0
    assert rate.take(10.5) > 0.0


def test_who_waits_long_has_no_more_than_a_second_has() -> None:
    rate = Rate(2.0)
    rate.take(0.0)
    assert [rate.take(100.0) == 0.0 for _ in range(3)] == [True, True, False]


def test_less_than_one_call_per_second_is_one_at_once() -> None:
    rate = Rate(0.1)
    assert rate.take(0.0) == 0.0
    assert round(rate.take(0.0)) == 10
    assert rate.take(10.0) == 0.0
