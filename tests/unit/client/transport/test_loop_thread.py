"""A callback of the loop's thread reaches the thread that waits, which is idle meanwhile."""

import threading
from concurrent.futures import Future

import pytest

from genserve.client.transport.loop_thread import Mailbox


class CountedFuture(Future[str]):
    """Knows how often it was looked at."""

    num_looks = 0

    def done(self) -> bool:
        self.num_looks += 1
        return super().done()


def test_waiting_for_a_result_does_not_ask_for_it_again_and_again() -> None:
    """One look for each callback, and one for the result: a thread that polled would slow the loop's thread down."""
    seen: list[tuple[int, int]] = []
    called, future = threading.Event(), CountedFuture()

    def callback(*args: int) -> None:
        seen.append((args[0], future.num_looks))
        called.set()

    mailbox = Mailbox(callback)

    def loop_thread() -> None:
        mailbox.put(7)
        called.wait(10)
        future.set_result("done")

    timer = threading.Timer(0.05, loop_thread)
    timer.start()
    assert mailbox.result(future, 30.0) == "done"
    timer.join()
    assert seen == [(7, 1)]
    assert future.num_looks == 2


def test_a_result_that_does_not_come_is_waited_for_until_the_limit() -> None:
    """The loop may be blocked, and wakes nobody up."""
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            Mailbox(print).result(Future(), 0.05)
        except TimeoutError as error:
            ends.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert len(ends) == 1


@pytest.mark.parametrize("limit_s", [None, 30.0])
def test_the_latest_callback_is_made_before_the_result_is_returned(limit_s: float | None) -> None:
    """Those before it may be skipped."""
    seen: list[int] = []
    mailbox, future = Mailbox(seen.append), Future[str]()
    mailbox.put(1)
    mailbox.put(2)
    future.set_result("done")
    assert mailbox.result(future, limit_s) == "done"
    assert seen == [2]
