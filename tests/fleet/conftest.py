"""A router before three daemons."""

from collections.abc import AsyncIterator

import pytest

from tests.fleet.scripted_fleet import ScriptedFleet, scripted_fleet


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet() as running:
        yield running
