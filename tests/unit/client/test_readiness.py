"""A client that waits for a daemon behind a proxy, which answers every call at once."""

import asyncio

import pytest

from genserve.client import AsyncClient, ClientClosedError
from genserve.errors import DeadlineError
from tests.unit.client.silent_daemon import SilentDaemon, silent_daemon


async def asked_twice(daemon: SilentDaemon) -> None:
    async with asyncio.timeout(60):
        while len(daemon.calls) < 2:
            await asyncio.sleep(0.01)


async def test_it_asks_again_with_pauses() -> None:
    async with silent_daemon() as daemon, AsyncClient(daemon.target) as client:
        daemon.answer = b""
        for timeout_s in (1.0, 10.0):  # a busy machine may be too slow to ask twice
            daemon.calls.clear()
            with pytest.raises(DeadlineError, match="no daemon was ready"):
                await client.wait_ready(timeout_s=timeout_s)
            if len(daemon.calls) > 1:
                break
        assert 1 < len(daemon.calls) <= 6 * timeout_s


async def test_it_ends_when_the_client_is_closed_in_a_pause() -> None:
    async with silent_daemon() as daemon, AsyncClient(daemon.target) as client:
        daemon.answer = b""
        waiting = asyncio.create_task(client.wait_ready(timeout_s=60))
        await asked_twice(daemon)
        await client.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(waiting, 60)
