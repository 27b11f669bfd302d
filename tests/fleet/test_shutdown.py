"""How a router ends while others call it."""

import asyncio

import pytest

from genserve.errors import UnavailableError
from tests.fleet.routers import routed
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until


async def test_a_router_that_drains_does_not_wait_for_watchers() -> None:
    """They get the last state, and their streams end."""
    async with routed(1) as fleet:
        replicas, statuses = fleet.client.watch_replicas(), fleet.client.watch_status()
        await anext(replicas)
        await anext(statuses)
        async with asyncio.timeout(STEP_S):
            draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
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


async def test_a_signal_ends_what_a_drain_would_have_waited_for() -> None:
    """After the time of the flags, though the call gave an hour: whoever sends it kills the process soon."""
    async with routed(1) as fleet:
        generating = asyncio.create_task(fleet.client.generate([1], timeout_s=3600))
        await fleet.daemons[0].stream()
        await fleet.client.drain(drain_timeout_s=3600)
        with advanced_clock() as clock:
            draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
            await clock.advance(61)
            await fleet.until_reported()
            assert not draining.done() and not generating.done()
            fleet.stopped.signal("SIGTERM")
            await clock.advance(61)
            await until(draining.done)
            with pytest.raises(UnavailableError):
                await generating
