import asyncio
import time

import pytest

from tests.support.clocks import advanced_clock, leaping_clock
from tests.support.patience import turns


async def test_a_clock_that_leaps_takes_no_time_for_timers() -> None:
    began_s = time.perf_counter()
    with leaping_clock():
        before_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 600)
        assert asyncio.get_running_loop().time() - before_s >= 600
    assert time.perf_counter() - began_s < 60


async def test_what_is_due_runs_when_a_clock_is_set_forward() -> None:
    due: list[str] = []
    with advanced_clock() as clock:
        before_s = time.monotonic()
        timers = [asyncio.get_running_loop().call_later(each, due.append, f"{each} s") for each in (600, 700)]
        await turns()
        assert due == []
        await clock.advance(601)
        assert due == ["600 s"] and time.monotonic() - before_s >= 600.9
        timers[1].cancel()


async def test_time_passes_in_steps_until_something_holds() -> None:
    with advanced_clock() as clock:
        before_s = time.monotonic()
        waiting = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 600))
        await clock.advance_until(waiting.done, 100)
        assert 600 <= time.monotonic() - before_s < 800
        assert isinstance(waiting.exception(), TimeoutError)


async def test_a_deadline_that_passes_with_the_clock_ends_what_waits() -> None:
    with advanced_clock() as clock:
        waiting = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 600))
        await clock.advance(599)
        assert not waiting.done()
        await clock.advance(2)
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], TimeoutError)
