"""The write deadline ends what it is for, and nothing else."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from genserve.errors import DeadlineError
from genserve.rpc.streams.write_deadline import WriteDeadline, Writer
from tests.support.clocks import leaping_clock
from tests.support.patience import turns
from tests.support.refusals import refuses

TIMEOUT_S = 8.0
LATE_S = TIMEOUT_S / 8
"""By how much a write may end late."""


@pytest.fixture(autouse=True)
async def only_order_counts() -> AsyncIterator[None]:
    """Timers fire when they are due and nothing else is to be done, however late the machine is."""
    with leaping_clock():
        yield


def now_s() -> float:
    """By the running loop."""
    return asyncio.get_running_loop().time()


async def never(message: object) -> None:
    """A client that does not read."""
    await asyncio.Event().wait()


async def pass_s(seconds: float) -> None:
    """Lets time pass in which nothing happens."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


async def test_a_write_that_takes_too_long_is_an_error() -> None:
    """And the task may write on: its cancellation is over."""
    deadline, written = WriteDeadline(TIMEOUT_S), []

    async def at_once(message: str) -> None:
        written.append(message)

    for _ in range(2):
        began_s = now_s()
        with refuses(DeadlineError, says="8 s"):
            await deadline.write(never, "x")
        assert TIMEOUT_S <= now_s() - began_s <= TIMEOUT_S + LATE_S + 0.001
        await deadline.write(at_once, "y")
    assert written == ["y", "y"]


async def test_a_task_whose_write_was_late_is_not_cancelled_any_more() -> None:
    """Whoever catches the error can wait for something."""

    async def writer() -> int:
        with pytest.raises(DeadlineError):
            await WriteDeadline(TIMEOUT_S).write(never, "x")
        await pass_s(2 * TIMEOUT_S)
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    assert await asyncio.create_task(writer()) == 0


async def test_without_a_time_a_write_may_take_any_time() -> None:
    """0 is no deadline."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(WriteDeadline(0.0).write(never, "x"), 1e6)


async def test_another_cancellation_stays_one() -> None:
    """The client has gone, before and after the deadline has cancelled the write too."""
    deadline = WriteDeadline(TIMEOUT_S)
    task = asyncio.create_task(deadline.write(never, "x"))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    deadline = WriteDeadline(TIMEOUT_S)
    both = asyncio.create_task(deadline.write(never, "x"))
    await turns()
    asyncio.get_running_loop().call_later(TIMEOUT_S + LATE_S, both.cancel)  # in the turn in which the deadline does
    with pytest.raises(asyncio.CancelledError):
        await both


async def test_each_write_has_the_whole_time() -> None:
    """The one before does not count, nor do those of others."""
    deadline, ended_s = WriteDeadline(TIMEOUT_S), []

    async def writer() -> None:
        began_s = now_s()
        with pytest.raises(DeadlineError):
            await deadline.write(never, "x")
        ended_s.append(now_s() - began_s)

    first = asyncio.create_task(writer())
    await pass_s(0.6 * TIMEOUT_S)
    second = asyncio.create_task(writer())
    await first
    assert not second.done()
    await second
    assert all(TIMEOUT_S <= each <= TIMEOUT_S + LATE_S + 0.001 for each in ended_s)


async def test_only_the_present_write_of_a_writer_is_late() -> None:
    """Its task may wait for any time between two writes."""
    with refuses(DeadlineError, says="8 s"), Writer(WriteDeadline(TIMEOUT_S)) as writer:
        for _ in range(3):
            writer.num_looks = 0
            await pass_s(0.6 * TIMEOUT_S)
            writer.num_looks = None
            await pass_s(2 * TIMEOUT_S)
        began_s = now_s()
        writer.num_looks = 0
        try:
            await never("x")
        finally:
            assert TIMEOUT_S <= now_s() - began_s <= TIMEOUT_S + LATE_S + 0.001
    await pass_s(2 * TIMEOUT_S)
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0


async def test_nothing_is_kept_of_writes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a timer run without one."""
    deadline, loop, timers = WriteDeadline(TIMEOUT_S), asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def counted(delay_s: float, *rest: Any) -> asyncio.TimerHandle:
        timers.append(delay_s)
        return call_later(delay_s, *rest)

    monkeypatch.setattr(loop, "call_later", counted)
    writing = asyncio.create_task(deadline.write(never, "x"))
    kept = weakref.ref(writing)
    await asyncio.wait({writing})
    assert isinstance(writing.exception(), DeadlineError)
    del writing
    gc.collect()
    assert kept() is None
    await pass_s(LATE_S)
    num_timers = len(timers)
    await pass_s(10 * TIMEOUT_S)
    assert len(timers) == num_timers > 0
