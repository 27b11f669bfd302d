"""When a replica is started again, and when that is given up."""

import pytest

from genserve.placement.backoff import RestartBackoff, Starts


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    """From half a second to half a minute."""
    backoff = RestartBackoff()
    assert [backoff.after(0.0) for _ in range(9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_long_life_is_followed_by_a_short_wait() -> None:
    """A minute is long; the waits grow again from there."""
    backoff = RestartBackoff()
    waits = [backoff.after(life_s) for life_s in (0.0, 59.9, 60.0, 0.0, 0.0)]
    assert waits == [0.5, 1.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("has_served", "num_failed", "exit_status", "is_hopeless"),
    [
        (False, 1, 1, False),
        (False, 2, -9, False),
        (False, 3, 1, True),
        (False, 4, 1, True),
        (False, 1, 2, True),
        (False, 1, None, False),
        (True, 3, 1, False),
        (True, 1, 2, False),
    ],
)
def test_starts_are_given_up_only_while_none_has_succeeded(
    has_served: bool, num_failed: int, exit_status: int | None, is_hopeless: bool
) -> None:
    """After three, or after one with wrong flags."""
    assert Starts(has_served=has_served).is_hopeless(num_failed, exit_status) is is_hopeless


def test_no_replica_has_served_at_first() -> None:
    """Three failed starts are enough then."""
    assert not Starts().is_hopeless(2, 1)
    assert Starts().is_hopeless(3, 1)
