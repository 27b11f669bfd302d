"""A side that says nothing is given up; a process that could not listen is not taken for silence."""

import asyncio
import time

import pytest

from genserve.silence import silence


async def test_a_side_that_says_nothing_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        async with silence(0.04):
            await asyncio.Event().wait()


async def test_a_word_is_heard() -> None:
    async with silence(30):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_word_that_comes_after_the_process_stood_still_is_heard() -> None:
    said = asyncio.Event()
    async with silence(0.4):
        asyncio.get_running_loop().call_later(0.45, said.set)
        time.sleep(0.44)  # noqa: ASYNC251  the process stands still
        await said.wait()


async def test_an_error_of_the_other_side_passes() -> None:
    with pytest.raises(KeyError):
        async with silence(30):
            raise KeyError("a")
