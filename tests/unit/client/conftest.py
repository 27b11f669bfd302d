"""A scripted daemon and a client of it."""

from collections.abc import AsyncIterator

import pytest

from genserve.client import AsyncClient
from tests.unit.client.scripted_daemon import ScriptedDaemon, running_daemon


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with running_daemon() as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.target) as client:
        yield client
