"""A rollback of a fleet whose replicas have other versions on their disks."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from genserve.errors import NotResidentError
from genserve.settings.config import ServeConfig
from tests.fleet.routers import MAX_STAGING_BYTES, RoutedFleet, hold, over, push, restarted
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT
from tests.support.refusals import refuses
from tests.support.scripted_daemon import serving

NUM_REPLICAS = 3


@asynccontextmanager
async def keeping(directory: Path) -> AsyncIterator[RoutedFleet]:
    """Replicas with disks of their own, and their router."""
    (files := directory / "model").mkdir()
    (files / "config.json").write_text("{}")
    async with AsyncExitStack() as stack:
        daemons = []
        for number in range(NUM_REPLICAS):
            settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES, "files": files}
            config = ServeConfig(port=0, keep_committed=str(directory / f"kept-{number}"))
            daemons.append(await stack.enter_async_context(serving(config, instance_id=uuid4().hex, **settings)))
        daemons.sort(key=lambda daemon: daemon.address)  # the first one is asked first
        async with over(daemons) as fleet:
            await fleet.until_ready()
            yield fleet


async def kept(fleet: RoutedFleet) -> None:
    """Returns when what is served is on all disks."""
    for daemon in fleet.daemons:
        assert daemon.parts.keeper is not None
        await daemon.parts.keeper.close()


async def pushed(fleet: RoutedFleet, *versions: int) -> None:
    """To the fleet, and on the disks."""
    for version in versions:
        await push(fleet.running.address, version)
        await kept(fleet)


@pytest.mark.slow
async def test_a_canary_is_not_what_a_fleet_is_rolled_back_to(tmp_path: Path) -> None:
    """It is what the first replica has served before, but not the fleet."""
    async with keeping(tmp_path) as fleet:
        await pushed(fleet, 1, 2)
        await push(fleet.daemons[0].address, 7)
        await until(lambda: len(fleet.running.router.fleet.ready) == NUM_REPLICAS - 1)
        await pushed(fleet, 8)
        await fleet.until_ready()
        result = await fleet.client.load_weights(previous=True, force=True)
        assert result.push.weight_version == 2
        assert all(hold(2, daemon) for daemon in fleet.daemons)


@pytest.mark.slow
async def test_a_second_rollback_undoes_the_first_after_a_canary(tmp_path: Path) -> None:
    """Also through a router that has not seen what was served before: most replicas have it."""
    async with keeping(tmp_path) as fleet:
        await pushed(fleet, 1, 2)
        await push(fleet.daemons[0].address, 7)
        await until(lambda: len(fleet.running.router.fleet.ready) == NUM_REPLICAS - 1)
        await pushed(fleet, 8)
        await fleet.until_ready()
        async with restarted(fleet) as again:
            await again.until_ready()
            for version in (2, 8, 2):
                result = await again.client.load_weights(previous=True, force=True)
                assert result.push.weight_version == version
                await kept(again)


async def test_a_rollback_of_a_fleet_with_nothing_before_says_so(tmp_path: Path) -> None:
    async with keeping(tmp_path) as fleet:
        await pushed(fleet, 1)
        with refuses(NotResidentError, says="no version before the served one"):
            await fleet.client.load_weights(previous=True, force=True)
        assert all(hold(1, daemon) for daemon in fleet.daemons)
