"""What a fleet should be is kept through changes of routers, and replicas that are behind say nothing of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from safetensors.torch import save_file

from genserve.config import ServeConfig
from genserve.errors import LastReplicaError, PushRolledBackError
from genserve.fleet import pauses
from genserve.fleet.fleet import Fleet
from tests.fleet.routers import MAX_STAGING_BYTES, QUICK, RoutedFleet, hold, over, replica, routed, running
from tests.fleet.test_record import push, restarted
from tests.support.breakable_link import BreakableLink
from tests.support.patience import slow, turns, until
from tests.support.pulled_peers import CHECKPOINT
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon, GeneratingEngine, serving

SHARED = pytest.mark.xfail(reason="two routers share the replicas, each for itself", strict=True)


async def test_a_router_that_takes_its_replicas_back_believes_the_one_between() -> None:
    """A push has gone through another router, which looked after them while this one could not reach them."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        async with over([]) as first:
            for link in links:
                first.running.router.add(link.address)
            await first.until_ready(2)
            await push(first.running.address, 1)
            for link in links:
                link.kill()
            async with over(daemons) as second:
                await second.until_ready()
                await push(second.running.address, 2)
                await second.stack.aclose()
            for link in links:
                await link.listen_again()
            await first.until_ready(2)
            assert first.running.router.fleet.committed_version == 2
            assert all(hold(2, daemon) for daemon in daemons)


async def test_a_replica_that_missed_a_part_of_a_wake_up_puts_nobody_to_sleep() -> None:
    """Its memory sleeps still when the rest is woken: it is woken as well, and the others are awake."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        links.sort(key=lambda link: link.address)
        async with over([]) as fleet:
            for link in links:
                fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            await fleet.client.sleep(level=1)
            links[0].kill()
            await until(lambda: len(fleet.running.router.fleet.ready) == 1)
            await fleet.client.wake_up(tags=["weights"])
            await links[0].listen_again()
            await until(lambda: len(fleet.running.router.fleet.answering) == 2)
            await fleet.client.wake_up(tags=["kv_cache"])
            assert fleet.running.router.fleet.desired.asleep.tags == frozenset()
            await fleet.until_ready(2)
            assert not any(daemon.engine.asleep for daemon in daemons)


async def test_a_replica_joins_a_fleet_whose_weights_are_awake() -> None:
    """And whose KV cache sleeps, as before the push of a trainer on the same GPUs."""
    async with routed(1) as fleet, replica() as late:
        await fleet.client.sleep(level=1)
        await fleet.client.wake_up(tags=["weights"])
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)


async def test_a_replica_that_started_anew_is_followed_when_somebody_brings_all_a_version() -> None:
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


async def test_a_router_that_stood_by_waits_for_all_replicas() -> None:
    """The first one that it gets may have missed the last push."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        async with over([]) as first:
            for link in links:
                first.running.router.add(link.address)
            await first.until_ready(2)
            await push(first.running.address, 1)
            first.running.router.find(links[0].address).member.is_draining = True
            first.running.router.fleet.refresh()
            await push(first.running.address, 2)
            way = await stack.enter_async_context(BreakableLink(daemons[1].address))
            async with over(daemons[:1], replace(QUICK, settle_s=0.1)) as second:
                second.running.router.add(way.address)
                members = second.running.router.fleet.members
                await until(lambda: all("looks after this daemon" in member.failure for member in members))
                await slow(0.3)
                second.running.router.fleet.settings = QUICK
                way.kill()
                await until(lambda: not all("looks after this daemon" in member.failure for member in members))
                for link in links:
                    link.kill()
                await until(lambda: any(member.version is not None for member in members))
                await turns()
                await way.listen_again()
                await second.until_ready(2)
                assert second.running.router.fleet.committed_version == 2
                assert second.running.router.fleet.previous is None


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


async def test_a_lease_that_ended_without_a_replica_ends_there_when_the_router_learns_of_it() -> None:
    """The router has started with that replica alone, which had the lease written down."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        async with over([]) as fleet:
            for link in links:
                fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            lease = (await fleet.client.pause(no_expiry=True)).lease
            links[0].kill()
            await until(lambda: len(fleet.running.router.fleet.ready) == 1)
            await fleet.client.resume(lease.lease_id)
            links[1].kill()
        async with over(daemons[:1]) as again:
            await again.until_ready(1)
            again.running.router.add(daemons[1].address)
            await again.until_ready(2)
            await until(lambda: daemons[0].engine.running)
            assert daemons[1].engine.running
            assert not (await again.client.status()).state.pauses


async def test_a_lease_is_written_down_wherever_the_others_learn_of_it() -> None:
    """The replica that had missed it is told of it by a router, and is the first one that the next router reads."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        daemons.sort(key=lambda daemon: daemon.address)
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        async with over([]) as fleet:
            for link in links:
                fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            links[0].kill()
            await until(lambda: len(fleet.running.router.fleet.ready) == 1)
            await fleet.client.pause(no_expiry=True)
            links[1].kill()
        async with over(daemons[:1]) as again:
            await again.until_ready(1)
            again.running.router.add(daemons[1].address)
            await again.until_ready(2)
            await until(lambda: not daemons[0].engine.running)
            await again.until_ready(2)
            async with restarted(again, daemons) as last:
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


async def test_a_pushed_adapter_is_not_replaced_from_a_directory(tmp_path: Path) -> None:
    """What LoadLora had loaded under its name before is out of date."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5)
            fleet.running.router.add(daemons[1].address)
            await fleet.until_ready(2)
            await until(lambda: all(each.lora_names is not None for each in fleet.running.router.fleet.members))
            await fleet.until_reported()
            assert "poet" not in daemons[1].engine.loras.files


async def test_an_adapter_that_is_being_unloaded_is_not_loaded_again(tmp_path: Path) -> None:
    """One replica has done it, and another one takes its time."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            members = fleet.running.router.fleet.members
            await until(lambda: all(each.lora_names == {"poet"} for each in members))
            link.silence()
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            one = fleet.running.router.find(daemons[0].address).member
            await until(lambda: one.lora_names != {"poet"})
            fleet.running.router.fleet.refresh()
            await until_reported_by(fleet, daemons[0].address)
            link.let_go()
            await unloading
            await until(lambda: "poet" not in daemons[0].engine.loras.files)
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)


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
        fleet.running.router.fleet.states_changed.tell()
        await draining


@SHARED
async def test_routers_that_stand_by_do_not_share_the_replicas() -> None:
    """One of them has all, or none."""
    async with routed(2) as fleet, over([]) as one, over([]) as other:
        for standby, daemons in ((one, fleet.daemons), (other, fleet.daemons[::-1])):
            standby.running.router.add(daemons[0].address)
        await until(lambda: all(each.running.router.fleet.members[0].failure for each in (one, other)))
        await fleet.stack.aclose()
        await until(lambda: all(each.running.router.fleet.answering for each in (one, other)))
        for standby, daemons in ((one, fleet.daemons), (other, fleet.daemons[::-1])):
            standby.running.router.add(daemons[1].address)
        await until(lambda: 2 in [len(each.running.router.fleet.ready) for each in (one, other)])


async def test_a_router_that_stands_by_takes_no_replica_from_a_fleet_that_has_others() -> None:
    """As soon as it is reached again, it belongs to its fleet."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            async with over(daemons) as standby:
                members = standby.running.router.fleet.members
                await until(lambda: all("looks after this daemon" in member.failure for member in members))
                link.kill()
                alone = standby.running.router.find(daemons[1].address).member
                await until(lambda: "is left to the router" in alone.failure or alone.engine is not None)
                await link.listen_again()
                await fleet.until_ready(2)


async def until_reported_by(fleet: RoutedFleet, address: str) -> None:
    """Waits until a replica has told its state, which it does often."""
    member = fleet.running.router.find(address).member
    for _ in range(3):
        before = member.engine
        await until(lambda before=before: member.engine is not before)  # type: ignore[misc]


def adapter(directory: Path) -> str:
    """An adapter in a directory."""
    save_file(TENSORS, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    return str(directory)


@asynccontextmanager
async def adapting() -> AsyncIterator[Daemon]:
    """A replica that takes adapters, and says so."""
    engine = GeneratingEngine()
    engine.max_loras = 4
    settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES, "instance_id": uuid4().hex}
    async with serving(ServeConfig(port=0), engine=engine, **settings) as daemon:
        yield daemon
