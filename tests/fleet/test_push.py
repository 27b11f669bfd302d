"""One push for all replicas: on all of them, or on none."""

import asyncio
import uuid
from dataclasses import replace

import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import (
    ApplyInProgressError,
    DeadlineError,
    FleetPushError,
    ManifestMismatchError,
    NoReplicaError,
    PushNotFoundError,
    PushRolledBackError,
    UnsupportedError,
    WeightVersionMismatchError,
)
from genserve.routing.replica import ReplicaState
from genserve.v1 import weights_pb2, weights_pb2_grpc
from genserve.wire.conversions import manifest_message
from tests.fleet.routers import QUICK, RoutedFleet, hold, linked, over, replica, routed, until_reached
from tests.support.paced_push import PacedPush
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT, content, data_of, weights
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, field_of
from tests.support.scripted_engine import Gate


def served(fleet: RoutedFleet) -> list[int]:
    """The version of each daemon."""
    return [daemon.engine.weight_version for daemon in fleet.daemons]


def received(daemon: Daemon) -> int:
    """How many bytes of the push "p" a daemon has; -1 if it does not know the push."""
    try:
        return daemon.registry.report("p").push.received_bytes
    except PushNotFoundError:
        return -1


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "fanout"), [(1, 1), (2, 1), (4, 1), (5, 2), (4, 8)])
async def test_a_push_is_applied_on_all_replicas(num_replicas: int, fanout: int) -> None:
    """In a chain, a tree and a star; and all are ready at its version."""
    settings = replace(QUICK, fanout=fanout)
    async with routed(num_replicas, settings) as fleet:
        for version in (1, 2):
            result = await fleet.client.push_weights(weights(version), version=version, timeout_s=30)
            assert result.push.state == "applied"
            assert result.applied is not None
            assert (result.applied.previous_version, result.applied.active_version) == (version - 1, version)
            assert result.applied.requests_kept == 5 * num_replicas
            assert result.state.weight_version == version
            assert all(hold(version, daemon) for daemon in fleet.daemons)
            await fleet.until_ready()
        assert not any(daemon.engine.misuses for daemon in fleet.daemons)


@pytest.mark.slow
async def test_a_refusal_is_told_as_it_is_while_the_trainer_still_sends() -> None:
    """The replica's call is over then, and a write to it fails."""
    async with routed(2) as fleet:
        for _ in range(40):
            with pytest.raises(WeightVersionMismatchError):
                await fleet.client.push_weights(weights(1), version=1, expected_version=99)


async def test_all_are_prepared_before_one_commits() -> None:
    """While one of them still prepares, nobody serves the new version."""
    async with routed(3) as fleet:
        gate = fleet.daemons[2].engine.gates["prepare_weights"] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30))
        await until_reached(gate)
        await until(lambda: all(daemon.engine.prepared for daemon in fleet.daemons[:2]))
        await fleet.until_reported()
        assert served(fleet) == [0, 0, 0]
        gate.open.set()
        await pushing
        assert served(fleet) == [1, 1, 1]


async def test_a_replica_that_cannot_prepare_changes_nothing_anywhere() -> None:
    """Its bytes are freed on all, and the next push passes."""
    async with routed(3) as fleet:
        fleet.daemons[1].engine.fails["prepare_weights"] = ManifestMismatchError("no room for it")
        with refuses(FleetPushError, says="no room for it"):
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        assert served(fleet) == [0, 0, 0]
        for daemon in fleet.daemons:
            with pytest.raises(PushNotFoundError):
                daemon.registry.report("p")
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        assert served(fleet) == [1, 1, 1]


async def test_what_the_first_replica_refuses_is_freed_on_all() -> None:
    """The error is its own, and the next push passes."""
    async with routed(3) as fleet:
        fleet.daemons[0].engine.fails["prepare_weights"] = ManifestMismatchError("no room for it")
        with refuses(ManifestMismatchError, says="no room for it"):
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        assert served(fleet) == [0, 0, 0]
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert served(fleet) == [1, 1, 1]


async def test_with_min_replicas_the_others_go_on_without_it() -> None:
    """It gets no requests until it has fetched the version."""
    settings = replace(QUICK, min_replicas=2)
    async with routed(3, settings) as fleet:
        engine = fleet.daemons[1].engine
        engine.fails["prepare_weights"] = ManifestMismatchError("no room for it")
        gate = engine.gates["commit_weights"] = Gate()
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert served(fleet) == [1, 0, 1]
        await until_reached(gate)
        assert fleet.state(fleet.daemons[1]) is ReplicaState.SYNCING
        gate.open.set()
        await fleet.until_ready()
        assert hold(1, fleet.daemons[1])


async def test_replica_that_fails_to_commit_gets_no_requests_until_caught_up() -> None:
    """The others serve the version: it is decided."""
    async with routed(3) as fleet:
        failing = fleet.daemons[2]
        failing.engine.fails["commit_weights"] = PushRolledBackError("not now")
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        await until(lambda: hold(1, failing))
        await fleet.until_ready()
        assert not failing.engine.misuses


async def test_if_no_replica_commits_the_push_has_failed() -> None:
    """With the error of one of them, and nothing has changed."""
    async with routed(2) as fleet:
        for daemon in fleet.daemons:
            daemon.engine.fails["pause"] = DeadlineError("not now")
        with refuses(DeadlineError, says="not now"):
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert served(fleet) == [0, 0]
        await fleet.until_ready()


async def test_a_daemon_that_joins_fetches_the_version_of_the_fleet() -> None:
    """From a replica; it gets requests afterwards. So does one that has restarted with its checkpoint."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(3), version=3, timeout_s=30)
        async with replica() as late:
            fleet.running.router.add(late.address)
            await fleet.until_ready(3)
            assert hold(3, late)


async def test_replica_pushed_to_alone_waits_for_a_newer_version() -> None:
    """It is not set back, and it serves nothing that was not pushed to all."""
    async with routed(3) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        ahead = fleet.daemons[2]
        async with AsyncClient(ahead.address) as client:
            await client.push_weights(weights(7), version=7, timeout_s=30)
        members = fleet.running.router.fleet
        await until(lambda: "waits for a newer" in members.where(members.upstreams[ahead.address].member)[1])
        await fleet.client.push_weights(weights(8), version=8, timeout_s=30)
        await fleet.until_ready()
        assert hold(8, ahead)


async def test_the_same_version_with_other_bytes_is_not_the_same() -> None:
    """It was pushed to one of them alone, before it joined."""
    async with replica() as other, routed(2) as fleet:
        async with AsyncClient(other.address) as client:
            await client.push_weights(weights(5), version=1, timeout_s=30)
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        fleet.running.router.add(other.address)
        await fleet.until_ready(3)
        assert hold(1, other)


async def test_a_replica_that_was_brought_back_can_be_fetched_from() -> None:
    """It has the version by another push than the others."""
    async with routed(2) as fleet, replica() as late:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        first, back = fleet.daemons
        async with AsyncClient(back.address) as client:
            await client.push_weights(weights(5), version=1, timeout_s=30, force=True)
        await until(lambda: hold(1, back))
        await fleet.until_ready(2)
        await fleet.running.router.remove(first.address)
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)
        assert hold(1, late)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_replica_that_dies_while_a_push_arrives(lost: int) -> None:
    """Whoever it is, the push does not pass by halves: the client sends again what is missing, or hears that it
    failed; and a push to those that are left passes."""
    async with linked(3) as fleet:
        header = weights_pb2.PushHeader(
            push_id="p", weight_version=1, manifest=manifest_message(CHECKPOINT.as_manifest()), attempt="a"
        )
        async with PacedPush(fleet.running.address, header, data_of(1)) as push:
            push.send(0, 3 << 20)
            await until(lambda: all(received(daemon) >= 2 << 20 for daemon in fleet.daemons))
            fleet.links[lost].kill()
            push.send(3 << 20, len(data_of(1)))
            with pytest.raises(grpc.aio.AioRpcError):
                await push.end()
        assert [daemon.engine.weight_version for daemon in fleet.daemons] == [0, 0, 0]
        await fleet.until_ready(2)
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert sorted(daemon.engine.weight_version for daemon in fleet.daemons) == [0, 1, 1]


async def test_one_push_at_a_time() -> None:
    """A second one is told which is on its way."""
    async with routed(2) as fleet:
        gate = fleet.daemons[0].engine.gates["prepare_weights"] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="first"))
        await until_reached(gate)
        with refuses(ApplyInProgressError) as refused:
            await fleet.client.push_weights(weights(2), version=2, timeout_s=30)
        assert refused.value.metadata == {"push_id": "first"}
        gate.open.set()
        await pushing


async def test_staged_on_all_then_committed_or_discarded() -> None:
    """As with one daemon."""
    async with routed(3) as fleet:
        client = fleet.client
        staged = await client.push_weights(weights(1), version=1, timeout_s=30, push_id="s", action="stage")
        assert staged.push.state == "staged"
        assert (await client.get_push("s")).push.state == "staged"
        assert served(fleet) == [0, 0, 0]
        assert (await client.commit_push("s")).push.state == "applied"
        assert served(fleet) == [1, 1, 1]
        assert (await client.get_push("s")).push.state == "applied"
        await client.push_weights(weights(2), version=2, timeout_s=30, push_id="t", action="stage")
        await client.discard_push("t")
        for call in (client.get_push("t"), client.commit_push("t"), client.discard_push("t")):
            with pytest.raises(PushNotFoundError):
                await call


async def test_a_repeat_of_an_old_push_changes_nothing() -> None:
    """It gets its first answer again, and the fleet serves what it served."""
    async with routed(2) as fleet:
        for version in (1, 2):
            await fleet.client.push_weights(
                weights(version), version=version, timeout_s=30, push_id=f"p{version}", attempt="a"
            )
        result = await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p1", attempt="a")
        assert result.push.state == "applied"
        assert served(fleet) == [2, 2]
        assert (await fleet.client.status()).state.weight_version == 2
        await fleet.until_ready()


async def test_weights_are_read_from_a_replica() -> None:
    """Served ones, and their bytes."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        assert (await fleet.client.get_weights()).weight_version == 1
        pulled = await fleet.client.pull_weights()
        assert {tensor.name: bytes(tensor.data) for tensor in pulled.tensors.values()} == content(1)


async def test_a_fleet_loads_from_a_peer() -> None:
    """One replica fetches it from there, and the others from that one."""
    async with replica() as outside, routed(3) as fleet:
        async with AsyncClient(outside.address) as client:
            await client.push_weights(weights(4), version=4, timeout_s=30)
        result = await fleet.client.load_weights(peers=[outside.address], timeout_s=30)
        assert result.state.weight_version == 4
        assert all(hold(4, daemon) for daemon in fleet.daemons)


async def test_without_a_replica_nothing_can_be_pushed() -> None:
    """The error says why."""
    async with over([]) as fleet:
        with pytest.raises(NoReplicaError):
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30)


async def test_vllms_own_transfer_is_refused() -> None:
    """It would reach one replica alone."""
    async with routed(1) as fleet:
        with refuses(UnsupportedError, says="the replicas themselves"):
            await fleet.client.start_weight_update()


async def test_wrong_pushes_are_refused_as_by_a_daemon() -> None:
    """With the same errors."""
    async with routed(2) as fleet:
        wrong = weights(1)
        wrong.pop("a")
        with refuses(ManifestMismatchError, field='header.manifest.tensors["a"]'):
            await fleet.client.push_weights(wrong, version=1, timeout_s=30, push_id=uuid.uuid4().hex)
        assert served(fleet) == [0, 0]


async def test_a_push_without_any_frame_is_refused() -> None:
    """As by a daemon."""
    async with routed(1) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await weights_pb2_grpc.WeightServiceStub(channel).PushWeights(iter(()), timeout=30)
        assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "frame")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_a_trainer_that_goes_away_is_in_nobodys_way(share: float) -> None:
    """Before it has sent everything nothing is applied. Afterwards the push goes on without it: the replicas may have
    prepared it already. In either case the next push passes."""
    async with routed(3) as fleet:
        gate = fleet.daemons[0].engine.gates["prepare_weights"] = Gate()
        header = weights_pb2.PushHeader(
            push_id="p", weight_version=1, manifest=manifest_message(CHECKPOINT.as_manifest()), attempt="a"
        )
        async with PacedPush(fleet.running.address, header, data_of(1)) as push:
            push.send(0, int(share * len(data_of(1))))
            if share == 1:
                ending = asyncio.create_task(push.end())
                await until_reached(gate)
                ending.cancel()
            else:
                await until(lambda: received(fleet.daemons[0]) == int(share * len(data_of(1))))
        await fleet.until_reported()
        gate.open.set()
        await until(lambda: not fleet.running.pushes.are_live)
        assert served(fleet) == [int(share)] * 3
        await fleet.client.push_weights(weights(2), version=2, timeout_s=30)
        assert all(hold(2, daemon) for daemon in fleet.daemons)
