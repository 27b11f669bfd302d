"""How a router ends while others call it."""

import asyncio

from tests.fleet.routers import routed


async def test_a_router_that_drains_does_not_wait_for_watchers() -> None:
    """They get the last state, and their streams end."""
    async with routed(1) as fleet:
        replicas, statuses = fleet.client.watch_replicas(), fleet.client.watch_status()
        await anext(replicas)
        await anext(statuses)
        async with asyncio.timeout(20):
            draining = asyncio.create_task(fleet.running.drain(60))
            phases = [status.state.phase async for status in statuses]
            _ = [each async for each in replicas]
            await draining
        assert phases[-1] == "draining"


async def test_a_router_that_is_drained_ends_alone() -> None:
    """Its replicas go on. What it has is answered first, and a watcher hears of it."""
    async with routed(2) as fleet, fleet.client.watch_status() as watched:
        await anext(watched)
        assert (await fleet.client.drain(drain_timeout_s=7)).phase == "draining"
        assert [status.state.phase async for status in watched][-1] == "draining"
        assert (fleet.stopped.cause, fleet.stopped.limit_s(30)) == ("Drain", 7.0)
        assert not any(daemon.stopped.is_set() for daemon in fleet.daemons)
