"""What somebody brings to every replica himself, while one of them cannot be reached."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.fleet.reports import until_reported
from tests.fleet.routers import QUICK, RoutedFleet, hold, linked, push
from tests.support.patience import slow, until

SETTLE_S = 0.5


@asynccontextmanager
async def at_version_1() -> AsyncIterator[RoutedFleet]:
    """Three replicas that were pushed to."""
    async with linked(3, replace(QUICK, settle_s=SETTLE_S)) as fleet:
        await push(fleet.running.address, 1)
        yield fleet


async def test_absent_replica_does_not_hold_up_the_version_of_all_others() -> None:
    """It is brought to it when it is back."""
    async with at_version_1() as fleet:
        link = fleet.links[0]
        link.kill()
        await fleet.until_ready(2)
        for daemon in fleet.daemons[1:]:
            await push(daemon.address, 7, push_id="by hand")
        await fleet.until_ready(2)
        assert fleet.running.router.fleet.committed_version == 7
        await link.listen_again()
        await fleet.until_ready(3)
        assert hold(7, fleet.daemons[0])


@pytest.mark.slow
async def test_a_canary_whose_fleet_is_lost_is_not_followed() -> None:
    """The others served the version of the fleet when it was brought, and may come back with it."""
    async with at_version_1() as fleet:
        link = fleet.links[0]
        members = fleet.running.router.fleet
        await fleet.client.remove_replica(fleet.links[2].address)
        await push(fleet.daemons[1].address, 7, push_id="canary")
        await fleet.until_ready(1)
        link.kill()
        await until(lambda: not members.ready)
        await slow(2 * SETTLE_S)
        await until_reported(members)
        assert members.committed_version == 1
        await link.listen_again()
        await fleet.until_ready(1)


async def test_router_waits_for_a_replica_that_is_away_for_a_moment() -> None:
    """As by a router that starts: a canary that comes meanwhile is one."""
    async with at_version_1() as fleet:
        link = fleet.links[0]
        members = fleet.running.router.fleet
        await fleet.client.remove_replica(fleet.links[2].address)
        members.settings = replace(members.settings, settle_s=60.0)
        link.kill()
        await fleet.until_ready(1)
        await push(fleet.daemons[1].address, 7, push_id="canary")
        await until(lambda: not members.ready)
        await link.listen_again()
        await fleet.until_ready(1)
        assert members.committed_version == 1
