"""A fleet that died altogether: what each replica has on its disk says when the fleet has served it."""

from contextlib import AsyncExitStack

from genserve.rpc.convert.control import kept_fleet_record
from genserve.weights.kept.directory import KeptRecord
from tests.fleet.routers import hold, linked, over, push, replica
from tests.support.patience import until
from tests.support.scripted_daemon import Daemon


async def comes_back(daemon: Daemon, version: int, fleet_epoch: int) -> None:
    """It has started with this version of its disk."""
    await push(daemon.address, version, push_id=f"push {version}")
    digest = daemon.resident.content_digest
    kept = KeptRecord(version, f"push {version}", digest, fleet_epoch)
    daemon.board.membership.record = kept_fleet_record(kept, "")


async def test_version_of_highest_epoch_comes_back_not_of_highest_number() -> None:
    """The replica that missed the rollback has version 10 on its disk."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(3)]
        for daemon, kept in zip(daemons, ((10, 5), (7, 9), (10, 5)), strict=True):
            await comes_back(daemon, *kept)
        async with over(daemons) as fleet:
            await fleet.until_ready()
            assert fleet.running.router.fleet.committed_version == 7
            assert all(hold(7, daemon) for daemon in daemons)


async def test_what_no_router_has_written_down_comes_back_by_its_number() -> None:
    """As a disk that an older genserve has written: any record says more."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        await comes_back(daemons[0], 7, 9)
        await push(daemons[1].address, 10)
        async with over(daemons) as fleet:
            await until(lambda: fleet.running.router.fleet.committed_version == 7)
    async with replica() as first, replica() as second:
        await push(first.address, 7)
        await push(second.address, 10)
        async with over([first, second]) as fleet:
            await until(lambda: fleet.running.router.fleet.committed_version == 10)


async def test_a_record_of_a_disk_does_not_take_the_place_of_a_whole_one() -> None:
    """It has the same epoch, and says nothing of adapters: neither this router nor the next one loses them."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await push(fleet.running.address, 7, push_id="push 7")
            fleet.running.router.fleet.desired.loras["poet"] = "/adapters/poet"
            await push(fleet.running.address, 8, push_id="push 8")
            epoch = fleet.running.router.fleet.desired.epoch
            await comes_back(daemons[1], 8, epoch)
            fleet.blind()
            async with over([daemons[1], daemons[0]]) as again:
                await again.until_ready(2)
                assert again.running.router.fleet.desired.loras == {"poet": "/adapters/poet"}
                await until(lambda: b"poet" in daemons[1].board.membership.record.content)


async def test_a_daemon_that_comes_back_from_its_disk_is_told_the_whole_record() -> None:
    """Its router has told it to the one before, and there was no change since: the next router would lose adapters."""
    async with linked(1) as fleet:
        daemon, link = fleet.daemons[0], fleet.links[0]
        desired = fleet.running.router.fleet.desired
        desired.loras["poet"] = "/adapters/poet"
        await push(fleet.running.address, 8, push_id="push 8")
        await until(lambda: b"poet" in daemon.board.membership.record.content)
        await comes_back(daemon, 8, desired.epoch)
        link.cut()
        await until(lambda: b"poet" in daemon.board.membership.record.content)
