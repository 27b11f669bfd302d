"""Two routers of which each gets a part of the replicas: one serves them all in the end."""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from genserve.fleet import watch
from genserve.fleet.config import FleetSettings
from tests.fleet.routers import QUICK, RoutedFleet, hold, linked, over, push, replica
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.scripted_daemon import Daemon


class Standby:
    """A router that stands by, and the links by which it reaches each daemon."""

    def __init__(self, fleet: RoutedFleet, links: list[BreakableLink]) -> None:
        self.fleet, self.links = fleet.running.router.fleet, links

    @property
    def num_had(self) -> int:
        """Of how many replicas it hears what they do."""
        return sum(member.engine is not None for member in self.fleet.members)

    @property
    def num_ready(self) -> int:
        """Of its replicas."""
        return len(self.fleet.ready)


async def standing_by(stack: AsyncExitStack, daemons: list[Daemon], settings: FleetSettings = QUICK) -> Standby:
    """One that every daemon refuses."""
    links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
    fleet = await stack.enter_async_context(over([], settings))
    members = [fleet.running.router.add(link.address).member for link in links]
    await until(lambda: all("looks after this daemon" in member.failure for member in members))
    return Standby(fleet, links)


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a router that stands by."""
    monkeypatch.setattr(watch, "CALL_AGAIN_S", 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_routers_with_a_part_each_one_gives_way(first: int) -> None:
    """Whichever got its part first; and the other one is still there when that one ends."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        before = await stack.enter_async_context(AsyncExitStack())
        former = await before.enter_async_context(over(daemons))
        await former.until_ready()
        await push(former.running.address, 1)
        routers = [await standing_by(stack, daemons) for _ in range(2)]
        for number, standby in enumerate(routers):
            standby.links[1 - number].kill()
        routers[1 - first].links[1 - first].silence()
        await former.stack.aclose()
        await until(lambda: routers[first].num_had == 1)
        routers[1 - first].links[1 - first].let_go()
        await until(lambda: routers[1 - first].num_had == 1)
        for number, standby in enumerate(routers):
            await standby.links[1 - number].listen_again()
        await until(lambda: sorted(standby.num_ready for standby in routers) == [0, 2])
        winner, loser = sorted(routers, key=lambda standby: standby.num_ready, reverse=True)
        assert winner.fleet.committed_version == 1
        assert all("looks after" in each.failure or "left to" in each.failure for each in loser.fleet.members)
        for link in winner.links:
            link.kill()
        await until(lambda: loser.num_ready == 2)
        assert loser.fleet.committed_version == 1
        assert all(hold(1, daemon) for daemon in daemons)


async def test_of_two_routers_that_each_serve_a_part_one_gives_way() -> None:
    """Each was cut off from what the other one has, for so long that it was told what the fleet is by its own part."""
    async with linked(2) as first, AsyncExitStack() as stack:
        await push(first.running.address, 1)
        routers = [Standby(first, first.links), await standing_by(stack, first.daemons, replace(QUICK, settle_s=0.5))]
        for number, router in enumerate(routers):
            router.links[1 - number].kill()
        await until(lambda: [router.num_ready for router in routers] == [1, 1])
        for number, router in enumerate(routers):
            await router.links[1 - number].listen_again()
        await until(lambda: sorted(router.num_ready for router in routers) == [0, 2])
