"""Routers before three daemons."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from genserve.control import membership
from tests.fleet.routers import RoutedFleet, adapting, over
from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet


@pytest.fixture(autouse=True)
def routers_take_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts need not wait whether the one before comes back."""
    monkeypatch.setattr(membership, "RETURN_S", 0.0)


@pytest.fixture
async def impatient_router() -> AsyncIterator[ScriptedFleet]:
    """Its requests wait half a second for a replica: for tests in which there is none."""
    async with scripted_fleet(settings=replace(SETTINGS, wait_ready_s=0.5)) as running:
        yield running


@pytest.fixture
async def patient_router() -> AsyncIterator[ScriptedFleet]:
    """Its requests wait very long for a replica: what is answered is answered without that."""
    async with scripted_fleet(settings=replace(SETTINGS, wait_ready_s=300.0)) as running:
        yield running


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet() as running:
        yield running


@pytest.fixture
async def fleet() -> AsyncIterator[RoutedFleet]:
    """Three replicas that take adapters."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(3)]
        async with over(daemons) as running:
            await running.until_ready()
            yield running
