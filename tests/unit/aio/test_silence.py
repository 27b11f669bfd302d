"""A side that says nothing is given up; a process that could not listen is not taken for silence."""

import asyncio

import pytest

from genserve.aio.silence import silence
from tests.support.clocks import advanced_clock, leaping_clock


async def test_a_side_that_says_nothing_is_given_up() -> None:
    with leaping_clock():
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with silence(40):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(40)


async def test_a_word_is_heard() -> None:
    before = asyncio.all_tasks()  # all tests share one loop, and what another one left may run on it
    async with silence(30):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_a_word_that_comes_after_the_process_stood_still_is_heard() -> None:
    said = asyncio.Event()
    with advanced_clock() as clock:
        async with silence(400):
            asyncio.get_running_loop().call_later(450, said.set)
            await clock.advance(440)  # the process stands still
            await clock.advance(10)
            await said.wait()


async def test_an_error_of_the_other_side_passes() -> None:
    with pytest.raises(KeyError):
        async with silence(30):
            raise KeyError("a")
