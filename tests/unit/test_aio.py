"""Waits that grow, and sides that are silent too long."""

import asyncio

import pytest

from genserve.aio import Backoff, silence
from tests.support.clocks import advanced_clock, leaping_clock


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    backoff = Backoff(0.2, 3.0)
    assert [backoff.next_s() for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]


def test_after_a_success_the_waits_grow_from_the_first_one_again() -> None:
    backoff = Backoff(0.2, 3.0)
    waits = [backoff.next_s(), backoff.next_s()]
    backoff.reset()
    assert [*waits, backoff.next_s(), backoff.next_s()] == [0.2, 0.4, 0.2, 0.4]


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
