"""Digests of the live weights: one reading for all who ask, and the engine is not kept for it."""

import asyncio

import pytest

from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import DeadlineError, EngineTaintedError, GenserveError
from genserve.weights.digests import DIGESTS_TIMEOUT_S, LiveDigests
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, after, header

PART_S = 30.0
"""Nine times as long is longer than a test may take."""
MANY = 1_000_000


@pytest.fixture
def digests(rig: Rig) -> LiveDigests:
    return LiveDigests(rig.engine, rig.pauses, rig.board)


def num_parts(rig: Rig) -> int:
    """Parts that the engine was asked for."""
    return rig.engine.calls.count("weight_digests")


async def reading(rig: Rig, digests: LiveDigests) -> "asyncio.Task[object]":
    """One that stays in its first part until the gate of `weight_digests` is opened."""
    gate = rig.engine.gates["weight_digests"] = Gate()
    task = asyncio.create_task(digests.read())
    await gate.reached.wait()
    return task


async def test_simultaneous_callers_get_one_reading(rig: Rig, digests: LiveDigests) -> None:
    """Also who comes when it has begun; who asks later begins another one."""
    rig.engine.num_unread_parts = 3
    asking = [await reading(rig, digests), *(asyncio.create_task(digests.read()) for _ in range(8))]
    await turns()
    rig.engine.gates["weight_digests"].open.set()
    answers = await asyncio.gather(*asking)
    assert num_parts(rig) == 4
    assert all(answer == answers[0] for answer in answers)
    await digests.read()
    assert num_parts(rig) == 5


async def test_reading_ends_with_its_last_waiter(rig: Rig, digests: LiveDigests) -> None:
    """Others get it when one goes away. The engine is free as soon as its part has ended."""
    rig.engine.num_unread_parts = MANY
    first = await reading(rig, digests)
    second = asyncio.create_task(digests.read())
    await turns()
    first.cancel()
    rig.engine.gates["weight_digests"].open.set()
    await until(lambda: num_parts(rig) > 3)
    second.cancel()
    await asyncio.wait({first, second})
    asked = num_parts(rig)
    await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="", ttl_s=60.0, timeout_s=STEP_S)
    await turns()
    assert num_parts(rig) == asked


async def test_pushes_and_pauses_go_on_between_its_parts(rig: Rig, digests: LiveDigests) -> None:
    """None of them waits for more than one part. Its answer is about the version that is live at its end."""
    rig.engine.num_unread_parts = MANY
    task = asyncio.create_task(digests.read())
    await until(lambda: num_parts(rig) > 0)
    await rig.push(header("p1", 1))
    lease = await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="", ttl_s=60.0, timeout_s=STEP_S)
    await rig.pauses.resume(lease.lease_id)
    assert not task.done()
    rig.engine.num_unread_parts = 0
    assert (await task)[0] == 1


@pytest.mark.parametrize("paused", [False, True])
async def test_steps_have_nine_tenths_of_the_time_while_they_run(
    rig: Rig, digests: LiveDigests, *, paused: bool
) -> None:
    """Where the engine is paused, nothing waits."""
    rig.engine.num_unread_parts, rig.engine.part_s = 1, PART_S
    if paused:
        await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="", ttl_s=600.0, timeout_s=STEP_S)
        async with asyncio.timeout(STEP_S):
            await digests.read()
        return
    with advanced_clock() as clock:
        task = asyncio.create_task(digests.read())
        await until(lambda: num_parts(rig) == 1)
        await clock.advance(8.5 * PART_S)
        assert num_parts(rig) == 1
        await after(clock, PART_S, task)
    assert num_parts(rig) == 2


async def test_loop_of_calls_is_answered_ten_times_a_second_while_steps_run(rig: Rig, digests: LiveDigests) -> None:
    """What is known costs the engine nothing, but the process in which tokens pass."""
    with advanced_clock() as clock:
        await digests.read()
        again = asyncio.create_task(digests.read())
        await clock.advance(0.09)
        assert not again.done()
        await after(clock, 0.02, again)


async def test_a_reading_that_does_not_come_to_its_end_says_when_to_ask_again(rig: Rig, digests: LiveDigests) -> None:
    """It has ended then."""
    rig.engine.num_unread_parts, rig.engine.part_s = MANY, DIGESTS_TIMEOUT_S
    with advanced_clock() as clock, pytest.raises(DeadlineError, match="between pushes"):
        await after(clock, DIGESTS_TIMEOUT_S + 1.0, digests.read(), lambda: num_parts(rig) == 1)
    rig.engine.num_unread_parts = 0
    await digests.read()


async def test_an_error_is_told_to_all_and_ends_the_reading_alone(rig: Rig, digests: LiveDigests) -> None:
    """The next one may do better."""
    rig.engine.fails["weight_digests"] = GenserveError("a rank could not read its weights")
    asking = await asyncio.gather(digests.read(), digests.read(), return_exceptions=True)
    assert [type(each) for each in asking] == [GenserveError, GenserveError]
    await digests.read()


async def test_weights_that_are_gone_are_not_read(rig: Rig, digests: LiveDigests) -> None:
    """Also when they are dropped in the middle of a reading."""
    rig.engine.num_unread_parts = MANY
    task = asyncio.create_task(digests.read())
    await until(lambda: num_parts(rig) > 0)
    rig.board.tell_asleep(type(rig.board.asleep)(weights_lost=True))
    with pytest.raises(EngineTaintedError):
        await task
