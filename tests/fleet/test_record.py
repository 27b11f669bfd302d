"""What a fleet should be is written down on its replicas: it outlives the router, and who joins is brought to it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import FleetHeldError, LastReplicaError, PushRolledBackError
from genserve.fleet.desired import Version
from genserve.fleet.upstream import Upstream
from genserve.routing.replica import ReplicaState
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, fleet_pb2, types_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.fleet_pb2_grpc import FleetServiceStub
from genserve.wire.literals import ROUTER_ID_KEY
from tests.fleet.reports import clock_of_leases, silence_passes
from tests.fleet.routers import (
    MAX_STAGING_BYTES,
    RoutedFleet,
    hold,
    linked,
    over,
    push,
    replica,
    restarted,
    routed,
    running,
    until_reached,
)
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT, weights
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, serving
from tests.support.scripted_engine import Gate


def why(fleet: RoutedFleet, daemon: Daemon) -> str:
    """Why a replica gets no requests."""
    members = fleet.running.router.fleet
    return members.where(members.upstreams[daemon.address].member)[1]


@pytest.mark.slow
async def test_a_rollback_outlives_the_router() -> None:
    """The highest number is not the version of the fleet: the replica that missed the rollback comes back to it."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(3)]
        link = await stack.enter_async_context(BreakableLink(daemons[2].address))
        async with over(daemons[:2]) as fleet, clock_of_leases() as clock:
            fleet.running.router.add(link.address)
            await fleet.until_ready(3)
            await push(fleet.running.address, 10)
            link.silence()
            await silence_passes(clock, fleet.running.router.fleet, link.address)
            await push(fleet.running.address, 5, force=True)
            assert [daemon.engine.weight_version for daemon in daemons] == [5, 5, 10]
            link.cut()  # gRPC would notice after half a minute that this router is gone
            async with restarted(fleet, daemons) as again:
                await again.until_ready()
                assert all(hold(5, daemon) for daemon in daemons)
                assert (await again.client.status()).state.weight_version == 5


async def test_a_straggler_comes_back_to_a_rollback_without_a_restart() -> None:
    """It is told by what was written down there, not by its number."""
    async with linked(2) as fleet:
        link = fleet.links[0]
        await push(fleet.running.address, 10)
        link.kill()
        await until(lambda: len(fleet.running.router.fleet.ready) == 1)
        await push(fleet.running.address, 5, force=True)
        await link.listen_again()
        await fleet.until_ready(2)
        assert hold(5, fleet.daemons[0])


async def test_a_canary_does_not_become_the_version_of_the_fleet() -> None:
    """Somebody has pushed it to one replica alone, which gets no requests before and after a restart of the router."""
    async with routed(3) as fleet:
        await push(fleet.running.address, 1)
        canary = fleet.daemons[1]
        await push(canary.address, 2)
        await until(lambda: "pushed to it alone" in why(fleet, canary))
        async with restarted(fleet) as again:
            await again.until_ready(2)
            await until(lambda: "pushed to it alone" in why(again, canary))
            assert (await again.client.status()).state.weight_version == 1
            assert hold(2, canary)


async def test_what_all_replicas_were_brought_to_one_by_one_is_the_version() -> None:
    """As by vLLM's own weight transfer, which goes through no router."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1)
        for daemon in fleet.daemons:
            await push(daemon.address, 7, push_id="by hand")
        await until(lambda: fleet.running.router.fleet.committed_version == 7)
        await fleet.until_ready()
        async with restarted(fleet) as again:
            await again.until_ready()
            assert again.running.router.fleet.committed_version == 7


async def test_other_bytes_under_the_same_number_are_noticed() -> None:
    """And replaced by those of the fleet."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1, push_id="p")
        other = fleet.daemons[1]
        async with AsyncClient(other.address) as client:
            await client.push_weights(weights(5), version=1, force=True, timeout_s=30)
        await until(lambda: hold(1, other))
        await fleet.until_ready()


async def test_replicas_of_another_checkpoint_get_no_requests_until_a_push() -> None:
    """Both serve a version 0."""
    settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES}
    config = ServeConfig(port=0)
    async with (
        serving(config, instance_id="one", base_digest="a", **settings) as one,
        serving(config, instance_id="two", base_digest="a", **settings) as two,
        serving(config, instance_id="three", base_digest="b", **settings) as other,
        over([one, two, other]) as fleet,
    ):
        await fleet.until_ready(2)
        await until(lambda: "started with another checkpoint" in why(fleet, other))
        await push(fleet.running.address, 1)
        await fleet.until_ready()


async def test_a_lease_that_a_replica_brings_along_is_not_the_fleets() -> None:
    """It was granted by another router. Nobody else is paused, and the replica runs when it has joined."""
    async with routed(1) as elsewhere, routed(2) as fleet:
        await elsewhere.client.pause(no_expiry=True)
        (paused,) = elsewhere.daemons
        await elsewhere.stack.aclose()
        await fleet.client.add_replica(paused.address)
        await fleet.until_ready(3)
        assert paused.engine.running and running(fleet) == [True] * 2
        assert not (await fleet.client.status()).state.pauses


async def test_a_replica_that_somebody_has_paused_alone_gets_no_requests() -> None:
    """The others go on, and its reason names who holds it."""
    async with routed(2) as fleet:
        daemon = fleet.daemons[1]
        async with AsyncClient(daemon.address) as client:
            lease = (await client.pause(holder="somebody", ttl_s=60)).lease
            await until(lambda: "paused by 'somebody'" in why(fleet, daemon))
            assert running(fleet) == [True, False]
            await client.resume(lease.lease_id)
        await fleet.until_ready()


async def test_a_replica_that_joins_a_fleet_that_sleeps_is_put_to_sleep() -> None:
    """Before any request reaches it, also after a restart of the router; and all wake up together."""
    async with routed(2) as fleet, replica() as late, replica() as later:
        await push(fleet.running.address, 1)
        await fleet.client.sleep(level=1)
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        assert late.engine.asleep and hold(1, late)
        async with restarted(fleet, [*fleet.daemons, late]) as again:
            again.running.router.add(later.address)
            await again.until_ready(4)
            assert later.engine.asleep
            await again.client.wake_up()
            assert not any(daemon.engine.asleep for daemon in (*again.daemons, later))
            await again.until_ready(4)


async def test_replica_that_joins_during_a_partial_wake_up_is_put_to_sleep() -> None:
    """It is awake, and would serve while the fleet sleeps: until the rest is woken, too, also if this part is not."""
    async with routed(1) as fleet, replica() as late:
        await fleet.client.sleep(level=1)
        gate = fleet.daemons[0].engine.gates["wake_up"] = Gate()
        waking = asyncio.create_task(fleet.client.wake_up(tags=["weights"]))
        await until_reached(gate)
        fleet.running.router.add(late.address)
        await until(lambda: why(fleet, late).startswith("it is put to sleep"))
        gate.open.set()
        await waking
        await fleet.until_ready(2)
        assert late.engine.asleep and fleet.daemons[0].engine.asleep
        await fleet.client.wake_up()
        await fleet.until_ready(2)
        assert not late.engine.asleep


async def test_a_replica_that_was_away_when_the_fleet_woke_up_is_woken() -> None:
    """Otherwise its requests would wait for ever."""
    async with linked(2) as fleet:
        daemon, link = fleet.daemons[0], fleet.links[0]
        await fleet.client.sleep(level=1)
        link.kill()
        await until(lambda: len(fleet.running.router.fleet.ready) == 1)
        await fleet.client.wake_up()
        assert daemon.engine.asleep
        await link.listen_again()
        await fleet.until_ready(2)
        assert not daemon.engine.asleep


async def test_a_replica_that_knows_more_than_the_others_is_believed() -> None:
    """It was away when the router started, and nobody has changed anything since."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            await push(fleet.running.address, 1)
            # Only the second one hears of the next version.
            fleet.running.router.find(daemons[0].address).member.is_draining = True
            fleet.running.router.fleet.refresh()
            await push(fleet.running.address, 2)
            link.kill()
            fleet.blind()
            async with over(daemons[:1]) as again:
                await again.until_ready()
                assert again.running.router.fleet.committed_version == 1
                await link.listen_again()
                again.running.router.add(link.address)
                await again.until_ready(2)
                assert again.running.router.fleet.committed_version == 2
                assert all(hold(2, daemon) for daemon in daemons)


async def test_a_second_router_is_refused_until_the_first_one_has_ended() -> None:
    """It says who has the replicas, and takes them over when that router is gone."""
    async with routed(2) as fleet, over(fleet.daemons) as second:
        members = second.running.router.fleet.members
        await until(lambda: all("looks after this daemon" in member.failure for member in members))
        assert all(fleet.running.address in member.failure for member in members)
        await push(fleet.running.address, 1)
        await fleet.stack.aclose()
        await second.until_ready()
        assert second.running.router.fleet.committed_version == 1


async def test_what_a_former_router_has_on_its_way_is_refused() -> None:
    """It may have stood still for long."""
    async with routed(1) as fleet:
        former: Upstream = next(iter(fleet.running.router.fleet.upstreams.values()))
        await push(fleet.running.address, 1)
        async with restarted(fleet) as again:
            await again.until_ready()
            with refuses(FleetHeldError, says=again.running.address):
                await former.ask(former.control.Sleep, control_pb2.SleepRequest(), 30)
            with refuses(FleetHeldError, says=again.running.address):
                request = control_pb2.SetFleetStateRequest(fleet=types_pb2.FleetState(epoch=1 << 60))
                await former.ask(former.control.SetFleetState, request, 30)
            assert running(again) == [True]


async def test_only_a_router_writes_down_what_the_fleet_should_be() -> None:
    """Anybody else is refused, also under its name, unless it watches."""
    async with replica() as daemon, grpc.aio.insecure_channel(daemon.address) as channel:
        stub = ControlServiceStub(channel)
        request = control_pb2.SetFleetStateRequest(fleet=types_pb2.FleetState(epoch=1))
        for metadata in ((), ((ROUTER_ID_KEY, "me"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.SetFleetState(request, timeout=30, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("call", ["drain_replica", "remove_replica"])
async def test_the_only_replica_with_the_version_stays_unless_it_is_forced(call: str) -> None:
    """The other one has not got it yet."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1)
        await fleet.until_reported()  # a report from before the push may put a version in doubt
        await fleet.until_ready()
        first, second = fleet.daemons
        await getattr(fleet.client, call)(first.address)
        with refuses(LastReplicaError, says="version 1"):
            await getattr(fleet.client, call)(second.address)
        assert fleet.state(second) is ReplicaState.READY
        await getattr(fleet.client, call)(second.address, force=True)


async def test_the_record_can_be_seen() -> None:
    """With its epoch, which grows with each change."""
    async with routed(2) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        stub = FleetServiceStub(channel)

        async def record() -> types_pb2.FleetState:
            return (await stub.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=30)).fleet

        first = await record()
        await push(fleet.running.address, 3, push_id="p")
        after = await record()
        assert (after.weight_version, after.push_id) == (3, "p")
        async with fleet.client.paused(holder="trainer") as lease:
            paused = await record()
            assert [each.lease_id for each in paused.leases] == [lease.lease_id]
        assert first.epoch < after.epoch < paused.epoch < (await record()).epoch
        async with AsyncClient(fleet.daemons[0].address) as client:
            state = (await client.status()).state
            assert state is not None


async def test_a_daemon_that_joins_is_brought_to_the_version_whatever_it_serves() -> None:
    """Its number says nothing: it belongs to another run of the trainer."""
    async with replica() as late, routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        async with AsyncClient(late.address) as client:
            await client.push_weights(weights(7), version=7, timeout_s=30)
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        assert hold(1, late)


async def commit_on_one(fleet: RoutedFleet, daemon: Daemon, version: Version) -> None:
    """As a router that is killed before it has told the others."""
    members = fleet.running.router.fleet
    upstream = members.upstreams[daemon.address]
    request = weights_pb2.CommitPushRequest(push_id=version.push_id, fleet=members.record_with(version))
    await upstream.ask(upstream.weights.CommitPush, request, 30)


@pytest.mark.slow
@pytest.mark.parametrize("committed", [0, 1])
async def test_a_router_that_restarts_between_the_phases_finds_the_truth(committed: int) -> None:
    """Prepared on all: nobody serves it, and a repeat of the push goes on. Committed on one: it is decided, and the
    others follow."""
    async with routed(3) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        prepared = await fleet.client.push_weights(
            weights(2), version=2, timeout_s=30, push_id="p", attempt="a", action="prepare"
        )
        assert prepared.push.state == "prepared"
        assert [daemon.engine.weight_version for daemon in fleet.daemons] == [1, 1, 1]
        if committed:
            await commit_on_one(fleet, fleet.daemons[1], Version(2, "p"))
        fleet.blind()
        async with over(fleet.daemons) as again:
            await again.until_ready()
            if not committed:
                assert (await again.client.status()).state.weight_version == 1
                result = await again.client.push_weights(weights(2), version=2, timeout_s=30, push_id="p", attempt="a")
                assert result.push.state == "applied"
            assert all(hold(2, daemon) for daemon in fleet.daemons)
            assert (await again.client.status()).state.weight_version == 2


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_canary_of_a_push_that_failed_stays_one(*, restarts: bool) -> None:
    """All replicas have rolled it back. Then somebody tries it on one of them alone."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1, push_id="before")
        for daemon in fleet.daemons:
            daemon.engine.fails["commit_weights"] = PushRolledBackError("does not fit")
        with pytest.raises(PushRolledBackError):
            await push(fleet.running.address, 2, push_id="failed")
        await fleet.until_ready()
        async with AsyncExitStack() as stack:
            router = await stack.enter_async_context(restarted(fleet)) if restarts else fleet
            await router.until_ready()
            await push(fleet.daemons[0].address, 2, push_id="failed")
            await router.until_reported()
            assert router.running.router.fleet.committed_version == 1
            assert hold(1, fleet.daemons[1]) and router.state(fleet.daemons[1]) is ReplicaState.READY
