"""A router before three daemons."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet


@pytest.fixture
async def impatient_router() -> AsyncIterator[ScriptedFleet]:
    """Its requests wait half a second for a replica."""
    async with scripted_fleet(settings=replace(SETTINGS, wait_ready_s=0.5)) as running:
        yield running


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet() as running:
        yield running
