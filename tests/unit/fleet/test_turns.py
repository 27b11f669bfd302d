"""The turns in which a lease of the fleet is granted, and what holds them off."""

import asyncio
from typing import Any

import pytest

from genserve.fleet.turns import Turns
from tests.support import patience
from tests.support.clocks import leaping_clock
from tests.support.kept import kept


@pytest.fixture
def turns() -> Turns:
    return Turns()


async def is_waiting(task: "asyncio.Task[Any]") -> bool:
    await patience.turns()
    return not task.done()


async def test_a_lease_is_granted_by_one_call_at_a_time(turns: Turns) -> None:
    """Other leases are not concerned."""
    first = await turns.take("a", 10)
    (await turns.take("b", 10)).release()
    second = asyncio.create_task(turns.take("a", 10))
    assert await is_waiting(second)
    first.release()
    (await second).release()


@pytest.mark.parametrize("ended", ["a", None], ids=["of this lease", "of all"])
async def test_a_lease_is_granted_when_nobody_ends_it_any_more(turns: Turns, ended: str | None) -> None:
    """Also not those who begin to while the call waits."""
    with turns.holding_off("b"):
        (await turns.take("a", 10)).release()
    first, second = turns.holding_off(ended), turns.holding_off("a")
    with second:
        with first:
            taking = asyncio.create_task(turns.take("a", 10))
            assert await is_waiting(taking)
            late = turns.holding_off("a")
            late.__enter__()
        assert await is_waiting(taking)
    assert await is_waiting(taking)
    late.__exit__(None, None, None)
    (await taking).release()


@pytest.mark.parametrize("waits_for", ["turn", "end"])
async def test_a_wait_for_a_turn_ends(turns: Turns, waits_for: str) -> None:
    """In time, or when it is cancelled; the turn is free then."""
    if waits_for == "turn":
        held = await turns.take("a", 10)
        release = held.release
    else:
        ending = turns.holding_off("a")
        ending.__enter__()

        def release() -> None:
            ending.__exit__(None, None, None)

    with leaping_clock():
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await turns.take("a", 600)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(600)
    taking = asyncio.create_task(turns.take("a", 10))
    assert await is_waiting(taking)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    release()
    (await turns.take("a", 10)).release()


async def test_they_are_over_when_all_turns_are(turns: Turns) -> None:
    await turns.over()
    held = [await turns.take(each, 10) for each in "ab"]
    over = asyncio.create_task(turns.over())
    for turn in held:
        assert await is_waiting(over)
        turn.release()
    await over


async def test_nothing_is_left_of_leases_that_have_ended(turns: Turns) -> None:
    before = len(kept(turns))
    for number in range(10):
        with turns.holding_off(str(number)), turns.holding_off(None):
            pass
        (await turns.take(str(number), 10)).release()
    assert len(kept(turns)) == before
