"""Leases of a fleet through restarts of its router: none that is held ends, and none that has ended comes back."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from genserve.fleet import pauses
from genserve.fleet.fleet import Fleet
from tests.fleet.routers import linked, over, replica, restarted, routed, running
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until


async def test_a_pause_that_is_cancelled_while_it_is_written_down_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was told its id."""
    reached, forever = asyncio.Event(), asyncio.Event()

    async def write(fleet: Fleet) -> None:
        reached.set()
        await forever.wait()

    async with routed(2) as fleet:
        monkeypatch.setattr(pauses, "write_record", write)
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await reached.wait()
        pausing.cancel()
        await asyncio.wait({pausing})
        await until(lambda: running(fleet) == [True] * 2)


async def test_a_resume_before_the_fleet_is_known_lasts() -> None:
    """The next router has read the record of the lease only after that."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            lease = (await fleet.client.pause(no_expiry=True)).lease
            link.kill()
            fleet.blind()
            async with over(daemons[:1]) as again:
                again.running.router.add(link.address)
                await until(lambda: bool(again.running.router.fleet.leases.active))
                resuming = asyncio.create_task(again.client.resume(lease.lease_id))
                await again.until_reported()
                await link.listen_again()
                await resuming
                await again.until_ready(2)
                await until(lambda: daemons[1].engine.running)
                assert daemons[0].engine.running
                assert not (await again.client.status()).state.pauses


async def test_a_pause_before_the_fleet_is_known_lasts() -> None:
    """Its lease is in no record that the router finds then."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            link.kill()
            fleet.blind()
            async with over(daemons[:1]) as again:
                again.running.router.add(link.address)
                await until(lambda: bool(again.running.router.fleet.answering))
                pausing = asyncio.create_task(again.client.pause(no_expiry=True))
                await again.until_reported()
                await link.listen_again()
                await pausing
                await again.until_ready(2)
                await again.until_reported()
                assert not any(daemon.engine.running for daemon in daemons)
                assert len((await again.client.status()).state.pauses) == 1


async def test_lease_that_ended_without_a_replica_ends_there_once_known() -> None:
    """The router has started with that replica alone, which had the lease written down."""
    async with linked(2) as fleet:
        lease = (await fleet.client.pause(no_expiry=True)).lease
        fleet.links[0].kill()
        await until(lambda: len(fleet.running.router.fleet.ready) == 1)
        await fleet.client.resume(lease.lease_id)
        fleet.links[1].kill()
        await fleet.stack.aclose()
        async with over(fleet.daemons[:1]) as again:
            await again.until_ready(1)
            again.running.router.add(fleet.daemons[1].address)
            await again.until_ready(2)
            await until(lambda: fleet.daemons[0].engine.running)
            assert fleet.daemons[1].engine.running
            assert not (await again.client.status()).state.pauses


async def test_a_lease_is_written_down_wherever_the_others_learn_of_it() -> None:
    """The replica that had missed it is told of it by a router, and is the first one that the next router reads."""
    async with linked(2) as fleet:
        fleet.links[0].kill()
        await until(lambda: len(fleet.running.router.fleet.ready) == 1)
        await fleet.client.pause(no_expiry=True)
        fleet.links[1].kill()
        await fleet.stack.aclose()
        async with over(fleet.daemons[:1]) as again:
            await again.until_ready(1)
            again.running.router.add(fleet.daemons[1].address)
            await again.until_ready(2)
            await until(lambda: not fleet.daemons[0].engine.running)
            await again.until_ready(2)
            async with restarted(again, fleet.daemons) as last:
                await last.until_ready(2)
                await last.until_reported()
                assert running(last) == [False] * 2
                assert len((await last.client.status()).state.pauses) == 1


async def test_a_lease_stays_written_down_while_all_that_have_it_are_lost() -> None:
    """A replica that joins meanwhile is the first one that the next router reads."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        daemons.sort(key=lambda daemon: daemon.address)
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over([]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(1)
            await fleet.client.pause(no_expiry=True)
            link.kill()
            await until(lambda: not fleet.running.router.fleet.ready)
            fleet.running.router.add(daemons[0].address)
            await until(lambda: fleet.running.router.find(daemons[0].address).member.record is not None)
            await link.listen_again()
            await fleet.until_ready(2)
            async with restarted(fleet, daemons) as again:
                await again.until_ready(2)
                await again.until_reported()
                assert running(again) == [False] * 2
                assert not any(daemon.engine.running for daemon in daemons)
