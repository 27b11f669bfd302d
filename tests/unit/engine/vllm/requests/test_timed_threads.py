"""Work that takes too long is ended, and never stands in the way of other work."""

import asyncio
import threading
import time

import pytest

from genserve.engine.vllm.requests.timed_threads import TimedThreads


async def test_a_loop_that_never_ends_is_ended_and_frees_its_thread() -> None:
    """One thread: what comes next has it again."""
    threads = TimedThreads("test", num_threads=1, limit_s=0.2)
    ended = threading.Event()

    def loop() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await threads.run(loop)
        assert await asyncio.to_thread(ended.wait, 60)
        ended.clear()
        threads.limit_s = 60.0
        assert await threads.run(lambda: 5) == 5
        threads.limit_s = 0.2
    threads.close()


async def test_work_that_gets_no_thread_in_time_raises_and_never_runs() -> None:
    """A call into C cannot be ended: it keeps its thread."""
    threads = TimedThreads("test", num_threads=1, limit_s=0.1)
    release, done = threading.Event(), []
    with pytest.raises(TimeoutError):
        await threads.run(release.wait)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await threads.run(lambda: done.append("late"))
    assert time.monotonic() - began_s < 60
    release.set()
    threads.limit_s = 60.0
    assert await threads.run(lambda: 5) == 5
    assert done == []
    threads.close()


async def test_work_of_a_caller_that_is_gone_is_ended() -> None:
    """As if its time were up."""
    threads = TimedThreads("test", num_threads=1, limit_s=60)
    started, ended = threading.Event(), threading.Event()

    def loop() -> None:
        started.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    waiting = asyncio.create_task(threads.run(loop))
    assert await asyncio.to_thread(started.wait, 60)
    waiting.cancel()
    assert await asyncio.to_thread(ended.wait, 60)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    threads.close()


async def test_what_the_work_raises_is_raised() -> None:
    """And its own TimeoutError is its own."""
    threads = TimedThreads("test", num_threads=1, limit_s=60)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()
