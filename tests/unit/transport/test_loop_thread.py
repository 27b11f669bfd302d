"""A thread waits for what another thread's loop does: it is idle meanwhile, and gets whatever comes of it."""

import asyncio
import contextlib
import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from genserve.errors import DeadlineError
from genserve.transport.errors import ClientClosedError, ClientMisuseError
from genserve.transport.loop_thread import LoopThread, Mailbox
from tests.support.patience import slow
from tests.support.refusals import refuses


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
        called.wait(30)
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


class Call:
    """A call that waits until it is told to go on, and for a moment when it is cancelled."""

    def __init__(self) -> None:
        self.has_begun, self.was_cancelled = threading.Event(), threading.Event()

    async def run(self, mailbox: Mailbox | None = None) -> None:
        """For a loop."""
        self.has_begun.set()
        if mailbox is not None:
            mailbox.put("progress")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.was_cancelled.set()
            raise


class Loop:
    """A loop's thread, and how often it was shut down."""

    def __init__(self) -> None:
        self.num_shut_down = 0
        self.thread = LoopThread("a loop", self._shut_down)

    async def _shut_down(self) -> None:
        self.num_shut_down += 1


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.thread.close()


async def answer(text: str) -> str:
    """The shortest call."""
    return text


async def fail(error: BaseException) -> None:
    """A call that fails."""
    raise error


def test_a_call_that_is_not_waited_for_any_longer_is_cancelled(loop: Loop) -> None:
    """Its caller has heard that it took too long; and the next one is served."""
    call = Call()
    with refuses(DeadlineError, says="0.05 s"):
        loop.thread.run(call.run(), 0.05)
    assert loop.thread.run(answer("the loop has seen both"), 20)
    assert not call.has_begun.is_set() or call.was_cancelled.wait(20)
    assert loop.thread.run(answer("yes"), 20) == "yes"


def test_an_interrupt_of_the_thread_that_waits_cancels_its_call(loop: Loop) -> None:
    """Here of the callback, as Ctrl-C comes anywhere."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    call, mailbox = Call(), Mailbox(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.thread.run(call.run(mailbox), 20, mailbox)
    assert call.was_cancelled.wait(20)


def test_closing_an_interrupted_loop_lets_the_call_undo_its_work(loop: Loop) -> None:
    """It needs the connection for that, which ends after it; as `with Client(...)` ends after Ctrl-C."""
    undone: list[int] = []

    async def undo(mailbox: Mailbox) -> None:
        mailbox.put("progress")
        try:
            await asyncio.Event().wait()
        finally:
            await slow(0.1)
            undone.append(loop.num_shut_down)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    mailbox = Mailbox(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.thread.run(undo(mailbox), 20, mailbox)
    loop.thread.close()
    assert (undone, loop.num_shut_down) == ([0], 1)


@pytest.mark.parametrize("limit_s", [None, 20])
@pytest.mark.parametrize("error", [TimeoutError("its own"), SystemExit(3), KeyError("a"), StopAsyncIteration()])
def test_an_error_of_a_call_is_its_caller_s_alone(loop: Loop, error: BaseException, limit_s: float | None) -> None:
    """Whatever it is: the loop goes on."""
    with pytest.raises(type(error)) as caught:
        loop.thread.run(fail(error), limit_s)
    assert caught.value is error
    assert loop.thread.run(answer("yes"), limit_s) == "yes"


def test_an_error_keeps_nothing_of_its_call_when_it_is_forgotten(loop: Loop) -> None:
    """Without the garbage collector: a call of gRPC ends in the daemon when it is freed."""
    seen: list[weakref.ref[Call]] = []

    async def fail_with_a_call() -> None:
        call = Call()
        seen.append(weakref.ref(call))
        raise KeyError

    gc.disable()
    try:
        for limit_s in (None, 20):
            with contextlib.suppress(KeyError):
                loop.thread.run(fail_with_a_call(), limit_s)
        loop.thread.run(answer("the loop is done with both"))
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()


def test_closing_cancels_what_runs_and_waits_for_it(loop: Loop) -> None:
    """After what the owner does first. Who waits is told, and so is who comes later; their calls never run."""
    call, ended = Call(), list[BaseException]()

    def wait() -> None:
        try:
            loop.thread.run(call.run())
        except ClientClosedError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert call.has_begun.wait(20)
    assert loop.thread.post(lambda: None)
    loop.thread.close()
    assert (call.was_cancelled.is_set(), loop.num_shut_down) == (True, 1)
    waiting.join(20)
    assert len(ended) == 1
    late = answer("late")
    with pytest.raises(ClientClosedError):
        loop.thread.run(late)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    assert not loop.thread.post(lambda: None)
    loop.thread.close()
    assert loop.num_shut_down == 1


def test_code_on_the_loop_neither_waits_for_it_nor_blocks_its_closing(loop: Loop) -> None:
    """Both would wait for ever."""
    inner = answer("inner")

    async def outer() -> None:
        with pytest.raises(ClientMisuseError, match="loop"):
            loop.thread.run(inner)
        loop.thread.close()
        await asyncio.sleep(0)

    with contextlib.suppress(ClientClosedError):  # it may end before
        loop.thread.run(outer(), 20)
    with pytest.raises(ClientClosedError):
        loop.thread.run(answer("late"), 20)
    assert inspect.getcoroutinestate(inner) == inspect.CORO_CLOSED
