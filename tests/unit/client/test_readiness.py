"""A client that waits for a daemon behind a proxy, which answers every call at once."""

import asyncio

import pytest

from genserve.client import AsyncClient, ClientClosedError
from genserve.errors import DeadlineError
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.silent_daemon import silent_daemon

PAUSE_S = 0.2


async def test_it_asks_again_with_pauses() -> None:
    """As long as it may."""
    with advanced_clock() as clock:
        async with silent_daemon() as daemon, AsyncClient(daemon.target) as client:
            daemon.answer = b""
            began_s = clock.now_s()
            waiting = asyncio.create_task(client.wait_ready())
            for num_calls in range(1, 6):
                await until(lambda num_calls=num_calls: len(daemon.calls) >= num_calls)  # type: ignore[misc]
                assert clock.now_s() - began_s >= (num_calls - 1) * PAUSE_S
                await clock.advance(PAUSE_S)
            await clock.advance(600)
            with pytest.raises(DeadlineError):
                await asyncio.wait_for(waiting, STEP_S)


async def test_it_ends_when_the_client_is_closed_in_a_pause() -> None:
    async with silent_daemon() as daemon, AsyncClient(daemon.target) as client:
        daemon.answer = b""
        waiting = asyncio.create_task(client.wait_ready())
        await until(lambda: len(daemon.calls) >= 2)
        await client.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(waiting, STEP_S)
