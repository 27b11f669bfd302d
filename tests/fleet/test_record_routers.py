"""A fleet through changes of its routers, and with replicas that are behind."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.errors import GenserveError, LastReplicaError, PushRolledBackError
from genserve.rpc.server import DaemonServer
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2
from genserve.wire.literals import SleepTag
from tests.fleet.routers import QUICK, hold, linked, over, push, replica, routed
from tests.support.breakable_link import BreakableLink
from tests.support.clocks import advanced_clock
from tests.support.patience import slow, turns, until
from tests.support.refusals import refuses


async def test_a_router_that_takes_its_replicas_back_believes_the_one_between() -> None:
    """A push has gone through another router, which looked after them while this one could not reach them."""
    async with linked(2) as first:
        await push(first.running.address, 1)
        for link in first.links:
            link.kill()
        async with over(first.daemons) as second:
            await second.until_ready()
            await push(second.running.address, 2)
            await second.stack.aclose()
        for link in first.links:
            await link.listen_again()
        await first.until_ready(2)
        assert first.running.router.fleet.committed_version == 2
        assert all(hold(2, daemon) for daemon in first.daemons)


async def test_a_replica_that_starts_again_before_its_first_report_gets_the_record() -> None:
    """Another run than the one that was asked what it keeps is at its address when the router begins to watch."""
    async with replica() as after, linked(2) as fleet:
        link, stays = fleet.links[0], fleet.daemons[1]
        upstream = fleet.running.router.find(link.address)
        connects = upstream.connect

        async def connected(timeout_s: float) -> None:
            upstream.connect = connects
            link.target = after.address
            link.cut()
            with suppress(GenserveError):  # of a connection that has ended
                await upstream.ask(upstream.control.GetStatus, control_pb2.GetStatusRequest(), timeout_s)
            await connects(timeout_s)

        upstream.connect = connected
        link.cut()
        await until(lambda: after.board.membership.record.epoch == stays.board.membership.record.epoch > 0)


async def test_a_replica_that_missed_a_part_of_a_wake_up_puts_nobody_to_sleep() -> None:
    """Its memory sleeps still when the rest is woken: it is woken as well, and the others are awake."""
    async with linked(2) as fleet:
        await fleet.client.sleep(level=1)
        fleet.links[0].kill()
        await until(lambda: len(fleet.running.router.fleet.ready) == 1)
        await fleet.client.wake_up(tags=["weights"])
        await fleet.links[0].listen_again()
        await until(lambda: len(fleet.running.router.fleet.answering) == 2)
        await fleet.client.wake_up(tags=["kv_cache"])
        assert fleet.running.router.fleet.desired.asleep.tags == frozenset()
        await fleet.until_ready(2)
        assert not any(daemon.engine.asleep for daemon in fleet.daemons)


async def test_a_replica_joins_a_fleet_whose_weights_are_awake() -> None:
    """And whose KV cache sleeps, as before the push of a trainer on the same GPUs."""
    async with routed(1) as fleet, replica() as late:
        await fleet.client.sleep(level=1)
        await fleet.client.wake_up(tags=["weights"])
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)


@pytest.mark.parametrize("tags", [["scheduling"], ["kv_cache"]])
async def test_joining_replica_sleeps_no_deeper_than_the_fleet(tags: list[SleepTag]) -> None:
    """To release weights and bring them back takes long, and they may be lost."""
    async with routed(1) as fleet, replica() as late:
        await fleet.client.sleep(tags=tags)
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)
        assert late.engine.asleep == fleet.daemons[0].engine.asleep and not late.engine.running
        assert not any("weights" in call for call in late.engine.calls)


async def test_restarted_replica_is_followed_when_all_get_one_version() -> None:
    """Nothing was written down there, because the version of the fleet came by vLLM's own transfer."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(replica())
        old = await stack.enter_async_context(AsyncExitStack())
        two = await old.enter_async_context(replica())
        port = int(two.address.rpartition(":")[2])
        async with over([one, two]) as fleet:
            await fleet.until_ready(2)
            for daemon in (one, two):
                await push(daemon.address, 7, push_id="by hand")
            await until(lambda: fleet.running.router.fleet.committed_version == 7)
            await old.aclose()
            await until(lambda: len(fleet.running.router.fleet.ready) == 1)
            await push(one.address, 8, push_id="next")
            await until(lambda: not fleet.running.router.fleet.ready)
            two = await stack.enter_async_context(replica(port))
            await until(lambda: len(fleet.running.router.fleet.answering) == 2)
            await push(two.address, 8, push_id="next")
            await until(lambda: fleet.running.router.fleet.committed_version == 8)
            await fleet.until_ready(2)


async def test_what_is_brought_to_all_is_followed_after_a_push_that_failed() -> None:
    """Which nobody has committed."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1)
        for daemon in fleet.daemons:
            daemon.engine.fails["commit_weights"] = RuntimeError("no")
        with pytest.raises(PushRolledBackError):
            await push(fleet.running.address, 2, push_id="failed")
        for daemon in fleet.daemons:
            await push(daemon.address, 7, push_id="by hand")
        await until(lambda: fleet.running.router.fleet.committed_version == 7)
        await fleet.until_ready()


@pytest.mark.slow
async def test_a_router_that_stood_by_waits_for_all_replicas() -> None:
    """The first one that it gets may have missed the last push."""
    async with linked(2) as first, BreakableLink(first.daemons[1].address) as way:
        await push(first.running.address, 1)
        first.running.router.find(first.links[0].address).member.is_draining = True
        first.running.router.fleet.refresh()
        await push(first.running.address, 2)
        async with over(first.daemons[:1], replace(QUICK, settle_s=0.1)) as second:
            second.running.router.add(way.address)
            members = second.running.router.fleet.members
            await until(lambda: all("looks after this daemon" in member.failure for member in members))
            await slow(0.3)
            second.running.router.fleet.settings = QUICK
            way.kill()
            await until(lambda: not all("looks after this daemon" in member.failure for member in members))
            for link in first.links:
                link.kill()
            await until(lambda: any(member.version is not None for member in members))
            await turns()
            await way.listen_again()
            await second.until_ready(2)
            assert second.running.router.fleet.committed_version == 2
            assert second.running.router.fleet.previous is None


async def test_a_router_that_has_nobody_any_more_waits_anew() -> None:
    """What it gets then may have missed what another router has pushed to the others."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        await push(daemons[0].address, 2)
        links[1].kill()
        async with over([]) as fleet:
            for link in links:
                fleet.running.router.add(link.address)
            known = fleet.running.router.fleet
            await until(lambda: any(member.version is not None for member in known.members))
            with advanced_clock() as clock:
                await clock.advance(QUICK.settle_s / 2)
                links[0].kill()
                await until(lambda: all(member.version is None for member in known.members))
                await links[1].listen_again()
                await until(lambda: any(member.version is not None for member in known.members))
                await clock.advance(QUICK.settle_s / 2)
                await turns()
                assert known.committed is None
                await links[0].listen_again()
                await until(lambda: known.committed_version == 2)


async def test_the_time_in_which_nobody_answers_does_not_count() -> None:
    """The first one that answers may have missed the last push, and the others may be about to answer."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        await push(daemons[1].address, 2)
        for link in links:
            link.kill()
        async with over([]) as fleet:
            for link in links:
                fleet.running.router.add(link.address)
            members = fleet.running.router.fleet
            with advanced_clock() as clock:
                await clock.advance(QUICK.settle_s - 1.0)
                await links[0].listen_again()
                await until(lambda: any(member.version is not None for member in members.members))
                await clock.advance(2.0)
                await turns()
                assert members.committed is None
                await links[1].listen_again()
                await until(lambda: members.committed_version == 2)


async def test_a_push_before_the_fleet_is_known_wakes_nobody_up() -> None:
    """What sleeps is written down besides the version."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            await fleet.client.sleep(tags=["kv_cache"])
            link.kill()
            fleet.blind()
            async with over(daemons[:1]) as again:
                again.running.router.add(link.address)
                await until(lambda: bool(again.running.router.fleet.answering))
                pushing = asyncio.create_task(push(again.running.address, 1))
                await again.until_reported()
                await link.listen_again()
                await pushing
                await again.until_ready(2)
                await again.until_reported()
                assert all(hold(1, daemon) and daemon.engine.asleep for daemon in daemons)


async def test_a_replica_that_is_drained_as_well_is_no_other_copy() -> None:
    """It has the version only until its requests have ended."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1)
        first, second = (fleet.running.router.find(daemon.address) for daemon in fleet.daemons)
        first.member.sent(1)
        draining = asyncio.create_task(fleet.client.drain_replica(first.address))
        await until(lambda: first.member.is_draining)
        with refuses(LastReplicaError, says="version 1"):
            await fleet.client.drain_replica(second.address)
        first.member.ended(1)
        fleet.running.router.fleet.states_changed.notify()
        await draining


async def test_standby_router_does_not_ask_for_a_drained_replica() -> None:
    """Its own router would have to wait for it when somebody adds it again."""
    async with routed(2) as fleet, over(fleet.daemons) as standby:
        members = standby.running.router.fleet.members
        await until(lambda: all("looks after this daemon" in member.failure for member in members))
        drained, seen = fleet.daemons[1], [""]
        membership = drained.board.membership
        drained.board.call_on_change(lambda: seen.append(membership.router_address))
        await fleet.client.drain_replica(drained.address)
        left = standby.running.router.find(drained.address).member
        await until(lambda: "left to the router" in left.failure)
        await fleet.client.add_replica(drained.address)
        await fleet.until_ready()
        assert set(seen) == {"", fleet.running.router.fleet.router.address}


async def test_a_router_that_stands_by_does_not_ask_for_a_replica_that_starts() -> None:
    """Its own router lists it with its step meanwhile."""
    board = StateBoard(None, tuple, "late", DaemonCondition.STARTING)
    board.tell_step("loading weights", 0.0)
    opened = await DaemonServer.open(ServeConfig(port=0), board)
    try:
        async with routed(1) as fleet, over(fleet.daemons) as standby:
            (member,) = standby.running.router.fleet.members
            await until(lambda: "looks after this daemon" in member.failure)
            seen = [""]
            board.call_on_change(lambda: seen.append(board.membership.router_address))
            late = standby.running.router.add(opened.address).member
            await until(lambda: "left to the router" in late.failure)
            await fleet.client.add_replica(opened.address)
            mine = fleet.running.router.fleet
            await until(lambda: "loading weights" in mine.where(mine.upstreams[opened.address].member)[1])
            assert set(seen) == {"", mine.router.address}
    finally:
        await opened.stop(0)


async def test_standby_router_takes_no_replica_from_a_fleet_that_has_others() -> None:
    """As soon as it is reached again, it belongs to its fleet."""
    async with linked(2) as fleet, over(fleet.daemons) as standby:
        members = standby.running.router.fleet.members
        await until(lambda: all("looks after this daemon" in member.failure for member in members))
        fleet.links[0].kill()
        alone = standby.running.router.find(fleet.daemons[0].address).member
        await until(lambda: "is left to the router" in alone.failure or alone.engine is not None)
        await fleet.links[0].listen_again()
        await fleet.until_ready(2)
