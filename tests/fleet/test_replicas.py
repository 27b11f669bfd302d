"""Who belongs to the fleet, and who gets requests."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.control.conditions import DaemonCondition
from genserve.engine.types import Load
from genserve.errors import InvalidFieldError
from genserve.fleet.member import Member
from genserve.routing.replica import ReplicaState, Request
from genserve.v1 import fleet_pb2
from genserve.v1.fleet_pb2_grpc import FleetServiceStub
from tests.fleet.reports import silence_passes, time_passes
from tests.fleet.routers import QUICK, linked, over, replica, routed
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import content, weights
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, reason_of
from tests.support.scripted_engine import Gate

READY = fleet_pb2.REPLICA_STATE_READY


async def listed(stub: FleetServiceStub) -> dict[str, fleet_pb2.Replica]:
    """The replicas by address."""
    answer = await stub.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=30)
    return {each.address: each for each in answer.replicas}


async def test_replicas_are_listed_with_what_they_serve() -> None:
    """In order of their addresses, with the version of the fleet and who has decided."""
    async with routed(3) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        stub = FleetServiceStub(channel)
        await fleet.client.push_weights(weights(2), version=2, push_id="p", timeout_s=30)
        answer = await stub.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=30)
        assert [each.address for each in answer.replicas] == sorted(daemon.address for daemon in fleet.daemons)
        assert answer.weight_version == 2
        assert [each.policy for each in answer.decisions] == ["requests"]
        for each in answer.replicas:
            assert (each.state, each.reason, each.push_id, each.max_num_seqs) == (READY, "", "p", 4)
            assert len(each.content_digest) == 64
        async with asyncio.timeout(STEP_S):
            while any(each.engine.weight_version != 2 for each in (await listed(stub)).values()):
                await fleet.until_reported()


async def test_a_replica_is_added_drained_and_removed() -> None:
    """By calls that may be repeated."""
    async with routed(1) as fleet, replica() as other, grpc.aio.insecure_channel(fleet.running.address) as channel:
        stub = FleetServiceStub(channel)
        for _ in range(2):
            await stub.AddReplica(fleet_pb2.AddReplicaRequest(address=other.address), timeout=30)
        await fleet.until_ready(2)
        upstream = fleet.running.router.find(other.address)
        request = Request()
        with fleet.running.router.fleet.carrying(request, upstream):
            draining = asyncio.ensure_future(
                stub.DrainReplica(fleet_pb2.DrainReplicaRequest(address=other.address), timeout=30)
            )
            await until(lambda: fleet.state(other) is ReplicaState.DRAINING)
            for _ in range(20):
                assert (await fleet.running.router.fleet.route(request)).address != other.address
            assert not draining.done()
        await draining
        assert list(await listed(stub)) == [fleet.daemons[0].address]
        await stub.AddReplica(fleet_pb2.AddReplicaRequest(address=other.address), timeout=30)
        await fleet.until_ready(2)
        await stub.RemoveReplica(fleet_pb2.RemoveReplicaRequest(address=other.address), timeout=30)
        assert list(await listed(stub)) == [fleet.daemons[0].address]


async def test_a_replica_that_is_drained_can_be_added_again() -> None:
    """The call that drains it ends then."""
    async with routed(2) as fleet:
        router = fleet.running.router
        upstream = router.find(fleet.daemons[0].address)
        with router.fleet.carrying(Request(), upstream):
            draining = asyncio.create_task(router.drain(upstream.address))
            await until(lambda: fleet.state(fleet.daemons[0]) is ReplicaState.DRAINING)
            router.add(upstream.address)
            async with asyncio.timeout(STEP_S):
                await draining
            assert fleet.state(fleet.daemons[0]) is ReplicaState.READY


async def test_a_drain_leaves_a_replica_that_was_added_again_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removes it while another one is asked whether it has the version."""
    async with routed(2) as fleet:
        router, address = fleet.running.router, fleet.daemons[0].address
        asked, answered = asyncio.Event(), asyncio.Event()

        async def late(*_: object) -> None:
            asked.set()
            await answered.wait()

        monkeypatch.setattr("genserve.fleet.router.check_other_has_version", late)
        draining = asyncio.create_task(router.drain(address))
        await asked.wait()
        await router.remove(address)
        router.add(address)
        answered.set()
        await draining
        assert address in router.fleet.upstreams


@pytest.mark.parametrize("address", ["", "nowhere", ":50051", "host:0", "host:99999", "host:port", "unix:", "a b:1"])
async def test_what_is_no_address_is_refused(address: str) -> None:
    """By name."""
    async with over([]) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await FleetServiceStub(channel).AddReplica(fleet_pb2.AddReplicaRequest(address=address), timeout=30)
        assert reason_of(caught.value) == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("replicas", "names"),
    [
        ([], "none"),
        (["b:1", "b:2"], "b:1, b:2"),
        ([f"b:{port}" for port in range(1, 10)], "b:1, b:2, b:3, b:4, b:5, b:6, b:7, b:8 and 1 more"),
    ],
)
async def test_a_replica_that_is_not_there_is_not_found(replicas: list[str], names: str) -> None:
    """For whoever removes or drains it; those that are there are named."""
    async with over([]) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        stub = FleetServiceStub(channel)
        for address in replicas:
            await stub.AddReplica(fleet_pb2.AddReplicaRequest(address=address), timeout=30)
        for call in (
            stub.RemoveReplica(fleet_pb2.RemoveReplicaRequest(address="a:1"), timeout=30),
            stub.DrainReplica(fleet_pb2.DrainReplicaRequest(address="a:1"), timeout=30),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(caught.value) == "REPLICA_NOT_FOUND"
            assert caught.value.details() == f"no replica 'a:1' belongs to the fleet, which has {names}"


async def test_a_replica_that_is_killed_is_out_at_once_and_back_when_it_answers() -> None:
    """Its reason says what is wrong. What it served meanwhile does not matter: it fetches what the fleet serves."""
    async with linked(2) as fleet:
        router, link = fleet.running.router, fleet.links[0]
        link.cut()
        await until(lambda: len(router.fleet.ready) == 1)
        await fleet.until_ready(2)
        link.kill()
        await until(lambda: len(router.fleet.ready) == 1)
        state, reason = router.fleet.where(router.find(link.address).member)
        assert (state, bool(reason)) == (ReplicaState.UNHEALTHY, True)
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        await link.listen_again()
        await fleet.until_ready(2)
        assert fleet.daemons[0].engine.live == content(1)


async def test_a_replica_that_falls_silent_is_out_after_its_deadline() -> None:
    """A host that vanishes closes no connection: nothing but the silence tells."""
    async with linked(2) as fleet:
        router, (link, other) = fleet.running.router, fleet.links
        with advanced_clock() as clock:
            await time_passes(clock, router.fleet, 2 * QUICK.silence_s)
            assert len(router.fleet.ready) == 2, "idle is not silent"
            link.silence()
            await silence_passes(clock, router.fleet, link.address)
            assert [each.address for each in router.fleet.ready] == [other.address]
            assert "for 60 s" in router.fleet.where(router.find(link.address).member)[1]
            link.let_go()
            await fleet.until_ready(2)


async def test_a_replica_of_another_model_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could take neither the prompts nor the weights of the others. The reason names both models."""
    async with routed(1) as fleet, replica() as other:
        info = replace(other.engine.info, architecture="Other", vocab_size=9)
        monkeypatch.setattr(type(other.engine), "info", property(lambda engine: info))
        router = fleet.running.router
        router.add(other.address)
        told = (
            f"it serves Other of 9 tokens in bfloat16, but {fleet.daemons[0].address} Scripted of 8 tokens in bfloat16"
        )
        await until(lambda: router.fleet.where(router.find(other.address).member)[1] == told)
        assert router.fleet.where(router.find(other.address).member)[0] is ReplicaState.UNHEALTHY
        monkeypatch.undo()
        await fleet.until_ready(2)


@pytest.mark.parametrize("num_others", [1, 0])
async def test_a_router_is_no_replica(num_others: int) -> None:
    """Not even of itself; what it says of itself becomes no longer."""
    async with routed(num_others) as fleet:
        router = fleet.running.router
        router.add(fleet.running.address)
        member = router.find(fleet.running.address).member
        await until(lambda: router.fleet.where(member)[1] == "it is a router, not a daemon")
        assert len(router.fleet.ready) == num_others


async def test_the_status_of_the_fleet() -> None:
    """Sums, and the version of the fleet; first at once and then on every change."""
    async with routed(3) as fleet:
        status = await fleet.client.status()
        assert (status.state.phase, status.load.running, status.load.waiting) == ("running", 9, 6)
        info = await fleet.client.server_info()
        assert "fleet" in info.features
        assert (info.limits.max_num_seqs, info.limits.max_active_requests) == (12, 3 * 8192)
        assert not info.frontend_ports
        async with fleet.client.watch_status() as watched:
            assert (await anext(watched)).state.weight_version == 0
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
            async for changed in watched:
                if changed.state.weight_version == 1:
                    break


async def test_the_limits_of_connections_are_the_routers_own() -> None:
    """Clients connect to it, and not to the replica that says what is served."""
    settings: Any = {"max_streams": 70, "max_request_rates": "generate=500", "write_timeout_s": 2.5}
    async with routed(1, environment_lists_callers=True, **settings) as fleet:
        info = await fleet.client.server_info()
        assert info.limits.write_timeout_s == 2.5
        assert (info.limits.max_streams, info.limits.request_rates) == (70, {"generate": 500.0})


async def test_watchers_of_replicas_hear_of_every_state() -> None:
    """All replicas each time."""
    async with routed(1) as fleet, replica() as other, grpc.aio.insecure_channel(fleet.running.address) as channel:
        call = FleetServiceStub(channel).WatchReplicas(fleet_pb2.WatchReplicasRequest(), timeout=30)
        (first,) = fleet.daemons

        async def told(*expected: tuple[Daemon, Any], version: int) -> None:
            """The next messages are of other states, then comes this one."""
            states = sorted((daemon.address, state) for daemon, state in expected)
            while True:
                message = await call.read()
                got = [(each.address, each.state) for each in message.replicas]
                if (got, message.weight_version) == (states, version):
                    return

        await told((first, READY), version=0)
        gate = other.engine.gates["commit_weights"] = Gate()
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        await told((first, READY), version=1)
        fleet.running.router.add(other.address)
        await told((first, READY), (other, fleet_pb2.REPLICA_STATE_CONNECTING), version=1)
        await told((first, READY), (other, fleet_pb2.REPLICA_STATE_SYNCING), version=1)
        gate.open.set()
        await told((first, READY), (other, READY), version=1)
        other.board.become(DaemonCondition.DRAINING)
        await told((first, READY), (other, fleet_pb2.REPLICA_STATE_DRAINING), version=1)
        await fleet.running.router.remove(other.address)
        await told((first, READY), version=1)
        call.cancel()


async def test_watchers_are_told_the_loads_at_an_interval() -> None:
    """Also if no state changes: with what the replicas last told, and what was sent to them."""
    async with routed(1) as fleet, fleet.client.watch_replicas(interval_s=0.1) as watched:
        await anext(watched)
        fleet.daemons[0].engine.current_load = Load(7, 1, 0.5, 10.0, 0.0)
        upstream = fleet.running.router.find(fleet.daemons[0].address)
        with fleet.running.router.fleet.carrying(Request(num_sequences=3), upstream):
            async for told in watched:
                (each,) = told.replicas
                if each.inflight == 3 and each.load is not None and (each.load.running, each.load.waiting) == (7, 1):
                    break
        async for told in watched:
            if told.replicas[0].inflight == 0:
                break


async def test_an_interval_that_is_too_short_is_refused() -> None:
    """By name. One that is not set is none."""
    async with over([]) as fleet:
        with refuses(InvalidFieldError, field="interval", says="0.1 s"):
            await anext(fleet.client.watch_replicas(interval_s=0.05))
        with refuses(InvalidFieldError, field="interval"):
            await anext(fleet.client.watch_replicas(interval_s=-1))
        async with fleet.client.watch_replicas() as watched:
            await anext(watched)
            following = asyncio.ensure_future(anext(watched))
            with advanced_clock() as clock:
                await clock.advance(3600)
                await fleet.client.status()  # comes after what was told, on the same connection
                assert not following.done()
            following.cancel()


async def test_a_replica_that_shuts_down_gets_no_requests() -> None:
    """It says so before it ends."""
    async with routed(2) as fleet:
        fleet.daemons[0].board.become(DaemonCondition.DRAINING)
        await until(lambda: fleet.state(fleet.daemons[0]) is ReplicaState.DRAINING)
        assert len(fleet.running.router.fleet.ready) == 1


async def test_a_router_without_replicas_does_not_serve() -> None:
    """As its health says."""
    async with over([]) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel, replica() as first:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        fleet.running.router.add(first.address)
        await fleet.until_ready(1)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_daemon_with_two_addresses_is_one_replica() -> None:
    """It would get twice the requests of another one, and be asked to fetch weights from itself."""
    async with routed(1) as fleet:
        router = fleet.running.router
        twice = fleet.daemons[0].address.replace("127.0.0.1", "localhost")
        router.add(twice)
        await until(lambda: "is the daemon at" in router.fleet.where(router.find(twice).member)[1])
        assert [each.address for each in router.fleet.ready] == [fleet.daemons[0].address]
        await router.remove(fleet.daemons[0].address)
        await until(lambda: [each.address for each in router.fleet.ready] == [twice])


async def test_two_addresses_of_a_daemon_that_are_added_at_once_are_one_replica() -> None:
    """Neither has told who it is when the other one is called."""
    async with over([]) as fleet, replica() as daemon:
        router = fleet.running.router
        both = [daemon.address, daemon.address.replace("127.0.0.1", "localhost")]
        for address in both:
            router.add(address)
        wheres = [lambda address=address: router.fleet.where(router.find(address).member) for address in both]
        await until(lambda: any("is the daemon at" in where()[1] for where in wheres))
        # Only then does the router begin to wait for the other one: it calls the replica once more after its version.
        await until(lambda: any(where()[1] == "the fleet starts" for where in wheres))
        with advanced_clock() as clock:
            await clock.advance(QUICK.settle_s)  # one of them never tells what it serves
            await fleet.until_ready(1)


async def test_the_answer_to_a_sleep_tells_of_it() -> None:
    """Although the replicas report their state only a moment later: here never."""
    async with routed(2) as fleet:
        fleet.blind()
        assert (await fleet.client.sleep()).phase == "sleeping"
        assert (await fleet.client.wake_up()).phase == "running"


async def test_a_fault_of_the_router_does_not_end_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is out of rotation for as long as nobody watches it, and back when that works again."""
    async with routed(2) as fleet:
        broken = fleet.running.router.find(fleet.daemons[0].address).member
        told = Member.reported
        is_broken = True

        def reported(member: Member, *report: Any) -> None:
            if is_broken and member is broken:
                raise ValueError("a fault")
            told(member, *report)

        monkeypatch.setattr(Member, "reported", reported)
        await until(lambda: fleet.state(fleet.daemons[0]) is ReplicaState.UNHEALTHY)
        is_broken = False
        await fleet.until_ready()
