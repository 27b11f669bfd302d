"""What somebody brings to every replica himself, while one of them cannot be reached."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from tests.fleet.reports import until_reported
from tests.fleet.routers import QUICK, RoutedFleet, hold, over, push, replica
from tests.support.breakable_link import BreakableLink
from tests.support.patience import slow, until
from tests.support.scripted_daemon import Daemon

SETTLE_S = 0.5


@asynccontextmanager
async def one_may_be_away() -> AsyncIterator[tuple[RoutedFleet, list[Daemon], BreakableLink]]:
    """A fleet at version 1, its daemons, and the way to the last of them."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(3)]
        link = await stack.enter_async_context(BreakableLink(daemons[2].address))
        async with over(daemons[:2], replace(QUICK, settle_s=SETTLE_S)) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(3)
            await push(fleet.running.address, 1)
            yield fleet, daemons, link


async def test_absent_replica_does_not_hold_up_the_version_of_all_others() -> None:
    """It is brought to it when it is back."""
    async with one_may_be_away() as (fleet, daemons, link):
        link.kill()
        await fleet.until_ready(2)
        for daemon in daemons[:2]:
            await push(daemon.address, 7, push_id="by hand")
        await fleet.until_ready(2)
        assert fleet.running.router.fleet.committed_version == 7
        await link.listen_again()
        await fleet.until_ready(3)
        assert hold(7, daemons[2])


@pytest.mark.slow
async def test_a_canary_whose_fleet_is_lost_is_not_followed() -> None:
    """The others served the version of the fleet when it was brought, and may come back with it."""
    async with one_may_be_away() as (fleet, daemons, link):
        members = fleet.running.router.fleet
        await fleet.client.remove_replica(daemons[1].address)
        await push(daemons[0].address, 7, push_id="canary")
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
    async with one_may_be_away() as (fleet, daemons, link):
        members = fleet.running.router.fleet
        await fleet.client.remove_replica(daemons[1].address)
        members.settings = replace(members.settings, settle_s=60.0)
        link.kill()
        await fleet.until_ready(1)
        await push(daemons[0].address, 7, push_id="canary")
        await until(lambda: not members.ready)
        await link.listen_again()
        await fleet.until_ready(1)
        assert members.committed_version == 1
