"""The requests that wait for a replica."""

import asyncio

import pytest

from genserve.errors import QueueFullError
from genserve.forward.caller import AbortedWhileWaitingError, Waiting


async def never() -> str:
    """No replica comes."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_too_many_are_refused_and_room_is_given_back() -> None:
    """However a wait ends."""
    waiting = Waiting(2)
    waits = [asyncio.create_task(waiting.wait("a", never())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as raised:
        await waiting.wait("b", never())
    assert raised.value.retry_after_s == 1.0
    waits[0].cancel()
    assert isinstance((await asyncio.gather(waits[0], return_exceptions=True))[0], asyncio.CancelledError)

    async def found() -> str:
        return "a replica"

    assert await waiting.wait("b", found()) == "a replica"
    assert waiting.abort(["a", "b", "c"]) == ["a"]
    assert isinstance((await asyncio.gather(waits[1], return_exceptions=True))[0], AbortedWhileWaitingError)
    assert waiting.abort(None) == []


async def test_all_are_aborted_or_one_by_its_own_event() -> None:
    """Others with the same id go on waiting."""
    waiting = Waiting()
    aborted = asyncio.get_running_loop().create_future()
    mine = asyncio.create_task(waiting.wait("a", never(), aborted))
    other = asyncio.create_task(waiting.wait("a", never()))
    await asyncio.sleep(0)
    aborted.set_result(None)
    assert isinstance((await asyncio.gather(mine, return_exceptions=True))[0], AbortedWhileWaitingError)
    assert not other.done()
    assert waiting.abort(None) == ["a"]
    assert isinstance((await asyncio.gather(other, return_exceptions=True))[0], AbortedWhileWaitingError)
