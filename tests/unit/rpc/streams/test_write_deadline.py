"""The write deadline ends what it is for, and nothing else."""

import asyncio

import pytest

from genserve.errors import DeadlineError
from genserve.rpc.streams.write_deadline import WriteDeadline
from tests.support.patience import STEP_S

SOON_S = 0.05


async def never(message: object) -> None:
    """A client that does not read."""
    await asyncio.Event().wait()


async def test_a_write_that_takes_too_long_is_an_error() -> None:
    """And the task may write on: its cancellation is over."""
    deadline, written = WriteDeadline(SOON_S), []

    async def at_once(message: str) -> None:
        written.append(message)

    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"the client did not read for 0\.05 s"):
            await asyncio.wait_for(deadline.write(never, "x"), STEP_S)
        await deadline.write(at_once, "y")
    assert written == ["y", "y"]


async def test_a_task_whose_write_was_late_is_not_cancelled_any_more() -> None:
    """Whoever catches the error can wait for something."""

    async def writer() -> int:
        with pytest.raises(DeadlineError):
            await WriteDeadline(SOON_S).write(never, "x")
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=2 * SOON_S)
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    assert await asyncio.create_task(writer()) == 0


async def test_without_a_time_a_write_may_take_any_time() -> None:
    """0 is no deadline."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(WriteDeadline(0.0).write(never, "x"), 4 * SOON_S)


async def test_another_cancellation_stays_one() -> None:
    """The client has gone, before and after the deadline has cancelled the write too."""
    deadline = WriteDeadline(SOON_S)
    task = asyncio.create_task(deadline.write(never, "x"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    both = asyncio.create_task(deadline.write(never, "x"))
    await asyncio.sleep(0)
    deadline._look_number += 100
    deadline._look()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both


async def test_each_write_has_the_whole_time() -> None:
    """The one before does not count, nor do those of others."""
    deadline = WriteDeadline(8.0)  # a look a second, which is made by hand
    first = asyncio.create_task(deadline.write(never, "x"))
    await asyncio.sleep(0)
    for _ in range(5):
        deadline._look()
    second = asyncio.create_task(deadline.write(never, "x"))
    await asyncio.sleep(0)
    for _ in range(4):
        deadline._look()
    with pytest.raises(DeadlineError):
        await first
    assert not second.done()
    second.cancel()
    await asyncio.wait([second])


async def test_nothing_is_kept_of_writes_that_have_ended() -> None:
    """Nor does a timer run without one."""
    deadline = WriteDeadline(SOON_S)
    with pytest.raises(DeadlineError):
        await deadline.write(never, "x")
    assert (deadline._begun, deadline._late) == ({}, set())
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=SOON_S)
    assert deadline._timer is None
