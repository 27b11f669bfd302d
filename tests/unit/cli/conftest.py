"""A scripted daemon for the commands."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.client.scripted_daemon import ScriptedDaemon, running_daemon


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with running_daemon() as daemon:
        yield daemon
