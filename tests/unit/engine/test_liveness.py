"""Waiting for an engine that may die or hang."""

import asyncio

import pytest

from genserve.engine.liveness import Liveness
from genserve.errors import DeadlineError, EngineDeadError


async def test_a_call_that_hangs_ends_at_its_deadline_and_is_cancelled() -> None:
    """The call's name is in the message."""
    never = asyncio.Event()
    call = never.wait()
    with pytest.raises(DeadlineError, match="pause did not finish within"):
        await Liveness().call(call, what="pause", timeout_s=0.01)
    await asyncio.sleep(0)
    assert call.cr_frame is None, "the coroutine still runs"


async def test_a_call_ends_when_the_engine_dies() -> None:
    """vLLM's calls would wait for ever."""
    liveness = Liveness()
    waiting = asyncio.create_task(liveness.call(asyncio.Event().wait(), what="pause", timeout_s=60))
    await asyncio.sleep(0)
    liveness.declare_dead()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, 1)


async def test_a_result_and_an_error_pass_through() -> None:
    """What the call says is what the caller gets."""

    async def result(value: int) -> int:
        return 1 // value

    assert await Liveness().call(result(1), what="x", timeout_s=1) == 1
    with pytest.raises(ZeroDivisionError):
        await Liveness().call(result(0), what="x", timeout_s=1)
