"""How the waits between attempts grow."""

from genserve.aio.backoff import Backoff


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    backoff = Backoff(0.2, 3.0)
    assert [backoff.next_s() for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]


def test_after_a_success_the_waits_grow_from_the_first_one_again() -> None:
    backoff = Backoff(0.2, 3.0)
    waits = [backoff.next_s(), backoff.next_s()]
    backoff.reset()
    assert [*waits, backoff.next_s(), backoff.next_s()] == [0.2, 0.4, 0.2, 0.4]
