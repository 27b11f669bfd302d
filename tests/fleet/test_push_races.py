"""Pushes whose trainer, replicas or answers are gone in the middle."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import grpc.aio
import pytest

from genserve.client import AsyncClient, PushResult
from genserve.control.conditions import EngineCondition
from genserve.errors import ApplyInProgressError, DeadlineError, GenserveError, PauseLeaseLostError, PushRolledBackError
from genserve.fleet.desired import Version
from genserve.fleet.services import weights as weight_service
from genserve.fleet.upstream import Upstream
from genserve.routing.replica import ReplicaState
from genserve.v1 import weights_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.wire.conversions import manifest_message
from tests.fleet.routers import RoutedFleet, hold, hold_back, linked, over, replica, routed, until_reached
from tests.support.paced_push import PacedPush
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import CHECKPOINT, content, data_of, weights
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, field_of, reason_of
from tests.support.scripted_engine import Gate


async def cancelled(task: "asyncio.Task[object]") -> None:
    """Ends a call, as a client that is killed does."""
    task.cancel()
    with suppress(asyncio.CancelledError, GenserveError):
        await task


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
@pytest.mark.parametrize("held", [0, 2])
async def test_a_trainer_that_goes_leaves_room_for_the_next_push(step: str, held: int) -> None:
    """Whatever the replicas were doing for it, another push passes, and all replicas are ready."""
    async with routed(3) as fleet:
        gate = fleet.daemons[held].engine.gates[step] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="gone"))
        await until_reached(gate)
        await cancelled(pushing)
        await fleet.until_reported()
        gate.open.set()
        async with asyncio.timeout(STEP_S):
            while True:
                try:
                    await fleet.client.push_weights(weights(2), version=2, timeout_s=20)
                    break
                except GenserveError:
                    await asyncio.sleep(0.2)
        await fleet.until_ready(3)
        assert all(hold(2, daemon) for daemon in fleet.daemons)


async def test_failed_push_of_a_gone_trainer_logs_no_error_in_the_router() -> None:
    """The log of a router tells nobody that an exception was never retrieved."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    async with routed(1) as fleet:
        engine = fleet.daemons[0].engine
        gate = engine.gates["prepare_weights"] = Gate()
        engine.fails["prepare_weights"] = PushRolledBackError("no room")
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30))
        await until_reached(gate)
        await cancelled(pushing)
        await fleet.until_reported()
        loop.set_exception_handler(lambda _, context: told.append(context))
        try:
            gate.open.set()
            await until(lambda: not fleet.running.pushes.are_live)
            gc.collect()
        finally:
            loop.set_exception_handler(None)
    assert told == []


@pytest.mark.parametrize("is_staged", [False, True], ids=["pushed", "staged"])
async def test_a_router_that_drains_ends_a_commit_that_nobody_waits_for(*, is_staged: bool) -> None:
    """Otherwise some replicas would serve the new version and the others the old one, with no router."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["commit_weights"] = Gate()
        if is_staged:
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="s", action="stage")
            committing = asyncio.create_task(fleet.client.commit_push("s"))
        else:
            committing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30))
        await until_reached(gate)
        await cancelled(committing)
        draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
        await until(lambda: hold(1, fleet.daemons[0]))
        await until(lambda: fleet.running.router.is_draining)
        await fleet.until_reported()
        assert not draining.done()
        gate.open.set()
        await draining
        assert all(hold(1, daemon) for daemon in fleet.daemons)


async def test_a_commit_that_nobody_waits_for_is_known_to_the_router() -> None:
    """The replicas carry it out: they serve the version of the fleet, none is taken to be ahead of it."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="s", action="prepare")
        gates = [daemon.engine.gates.setdefault("commit_weights", Gate()) for daemon in fleet.daemons]
        committing = asyncio.create_task(fleet.client.commit_push("s"))
        for gate in gates:
            await until_reached(gate)
        await cancelled(committing)
        for gate in gates:
            gate.open.set()
        await until(lambda: all(hold(1, daemon) for daemon in fleet.daemons))
        await fleet.until_reported()
        await fleet.until_ready(2)


async def test_a_commit_whose_answers_are_lost_is_found_out() -> None:
    """The links break while the engines exchange the weights; nobody repeats the push."""
    async with linked(2) as fleet:
        gates = [daemon.engine.gates.setdefault("commit_weights", Gate()) for daemon in fleet.daemons]
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30))
        for gate in gates:
            await until_reached(gate)
        for link in fleet.links:
            link.kill()
        with pytest.raises(GenserveError):
            await pushing
        for gate in gates:
            gate.open.set()
        await until(lambda: all(hold(1, daemon) for daemon in fleet.daemons))
        for link in fleet.links:
            await link.listen_again()
        await fleet.until_ready(2)
        assert (await fleet.client.status()).state.weight_version == 1


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
@pytest.mark.parametrize("removed", [0, 1, 2])
async def test_a_replica_that_is_removed_in_the_middle_of_a_push(step: str, removed: int) -> None:
    """The others take the push, or the trainer hears in words what was wrong; nothing stays in the way."""
    async with routed(3) as fleet:
        gate = fleet.daemons[removed].engine.gates[step] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=20))
        await until_reached(gate)
        await fleet.running.router.remove(fleet.daemons[removed].address)
        try:
            await pushing
        except GenserveError as error:
            assert error.reason not in ("INTERNAL", "CANCELLED")
        gate.open.set()
        await until(lambda: len(fleet.running.router.fleet.ready) == 2)
        await fleet.client.push_weights(weights(2), version=2, timeout_s=20)
        await fleet.until_ready(2)


async def join_ahead(fleet: RoutedFleet, ahead: Daemon) -> None:
    """A daemon joins, and somebody brings it to version 7, which the router knows."""
    members = fleet.running.router.fleet
    fleet.running.router.add(ahead.address)
    await fleet.until_ready(len(fleet.daemons) + 1)
    async with AsyncClient(ahead.address) as client:
        await client.push_weights(weights(7), version=7, timeout_s=30)
    await until(lambda: "waits for a newer" in members.where(members.upstreams[ahead.address].member)[1])


async def test_a_replica_that_is_ahead_does_not_stop_the_pushes_of_the_others() -> None:
    """It gets no requests before the fleet is newer."""
    async with replica() as ahead, routed(2) as fleet:
        await join_ahead(fleet, ahead)
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert all(hold(1, daemon) for daemon in fleet.daemons)
        assert fleet.state(ahead) is ReplicaState.SYNCING


async def test_a_replica_that_is_ahead_does_not_decide_about_a_push() -> None:
    """It alone commits: the replicas that get requests go on with the version of before, and the trainer hears it."""
    async with replica() as ahead, routed(2) as fleet:
        await join_ahead(fleet, ahead)
        for daemon in fleet.daemons:
            daemon.engine.fails["pause"] = DeadlineError("not now")
        with refuses(DeadlineError, says="not now"):
            await fleet.client.push_weights(weights(8), version=8, timeout_s=30)
        assert [daemon.engine.weight_version for daemon in (*fleet.daemons, ahead)] == [0, 0, 8]
        await fleet.until_ready()
        assert (await fleet.client.status()).state.weight_version == 0


async def test_a_commit_waits_for_nobody_elses_push() -> None:
    """It is told which one is on its way, and passes when that is over."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(2), version=2, timeout_s=30, push_id="s", action="stage")
        gate = fleet.daemons[0].engine.gates["prepare_weights"] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="first"))
        await until_reached(gate)
        with refuses(ApplyInProgressError) as refused:
            await fleet.client.commit_push("s")
        assert refused.value.metadata == {"push_id": "first"}
        gate.open.set()
        await pushing
        await fleet.client.commit_push("s")
        assert all(hold(2, daemon) for daemon in fleet.daemons)


async def test_a_repeat_of_an_applied_push_after_a_replica_has_joined() -> None:
    """It gets its first answer, though the new one never heard of it."""
    async with routed(2) as fleet, replica() as late:
        for version in (1, 2, 3):
            await fleet.client.push_weights(
                weights(version), version=version, timeout_s=30, push_id=f"p{version}", attempt="a"
            )
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        for version in (1, 2, 3):
            result = await fleet.client.push_weights(
                weights(version), version=version, timeout_s=30, push_id=f"p{version}", attempt="a"
            )
            assert result.push.state == "applied"
        await fleet.until_ready(3)
        assert all(hold(3, daemon) for daemon in [*fleet.daemons, late])


async def test_a_daemon_joins_after_a_partial_push() -> None:
    """It fetches all of the version."""
    async with routed(2) as fleet, replica() as late:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        part = {"a": weights(2)["a"]}
        await fleet.client.push_weights(part, version=2, partial=True, timeout_s=30)
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        live = late.engine.live
        assert live == {"a": content(2)["a"], "b": content(1)["b"]}


async def test_an_answer_from_before_a_commit_does_not_bring_the_old_version_back() -> None:
    """The router has asked a replica what it serves; a push is committed before the answer has come."""
    async with routed(1) as fleet:
        upstream = fleet.running.router.find(fleet.daemons[0].address)
        serves = fleet.running.router.fleet.serves
        found: list[int] = []

        def noted(upstream: Upstream, version: Version, beside: Iterable[Upstream] = ()) -> None:
            found.append(version.number)
            serves(upstream, version, beside)

        answers = hold_back(upstream.weights, "GetWeights")
        fleet.running.router.fleet.serves = noted
        upstream.member.doubt()
        await answers.given.wait()
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        answers.let_go.set()
        await fleet.until_reported()
        assert 0 not in found
        await fleet.until_ready(1)


async def repeat(fleet: RoutedFleet, version: int = 2) -> PushResult:
    """Pushes a version under one id."""
    return await fleet.client.push_weights(weights(version), version=version, timeout_s=30, push_id="p", force=True)


async def test_a_repeat_of_a_push_that_was_undone_is_not_applied() -> None:
    """A replica that got no requests any more had committed it, and was brought back, because the other one had
    refused. It receives the repeat, and gives its first answer again."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        await fleet.until_ready()
        first, other = fleet.daemons
        gate = other.engine.gates["prepare_weights"] = Gate()
        other.engine.fails["commit_weights"] = PushRolledBackError("no room")
        pushing = asyncio.create_task(repeat(fleet))
        await until_reached(gate)
        async with AsyncClient(first.address) as alone:
            lease = (await alone.pause(holder="somebody", no_expiry=True)).lease
            await until(lambda: fleet.state(first) is ReplicaState.SYNCING)
            gate.open.set()
            with refuses(PushRolledBackError, says="no room"):
                await pushing
            assert (await alone.get_push("p")).push.state == "applied"
            await until(lambda: hold(1, first))
            await alone.resume(lease.lease_id)
        await fleet.until_ready()
        with refuses(PushRolledBackError, says="another push_id"):
            await repeat(fleet)
        assert all(hold(1, daemon) for daemon in fleet.daemons)


@asynccontextmanager
async def out_of_rotation(fleet: RoutedFleet, number: int) -> AsyncIterator[None]:
    """Somebody has paused this replica alone."""
    async with AsyncClient(fleet.daemons[number].address) as alone:
        lease = (await alone.pause(holder="somebody", no_expiry=True)).lease
        await until(lambda: fleet.state_of(fleet.links[number].address) is ReplicaState.SYNCING)
        yield
        await alone.resume(lease.lease_id)


async def undo(fleet: RoutedFleet, version: int) -> None:
    """Pushes a version that only the first replica commits, which gets no requests: it is brought back to version 2."""
    await fleet.client.push_weights(weights(2), version=2, timeout_s=30)
    await fleet.until_ready()
    first, other = fleet.daemons
    async with out_of_rotation(fleet, 0):
        other.engine.fails["commit_weights"] = PushRolledBackError("no room")
        with refuses(PushRolledBackError, says="no room"):
            await repeat(fleet, version)
        async with AsyncClient(first.address) as alone:
            assert (await alone.get_push("p")).push.state == "applied"
        await until(lambda: hold(2, first))
    await fleet.until_ready()


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("other_is", ["refusing again", "away"])
async def test_a_repeat_that_the_other_replica_does_not_take_is_not_applied(version: int, other_is: str) -> None:
    """Who had committed it gives its first answer again. Also if the push was a rollback: its number is below that of
    the fleet in any case."""
    async with linked(2) as fleet:
        await undo(fleet, version)
        first, other = fleet.daemons
        if other_is == "away":
            fleet.links[1].kill()
            await fleet.until_ready(1)
        else:
            other.engine.fails["commit_weights"] = PushRolledBackError("no room")
        with refuses(PushRolledBackError, says="another push_id" if other_is == "away" else "no room"):
            await repeat(fleet, version)
        assert hold(2, first) and fleet.running.router.fleet.committed_version == 2


async def test_a_replica_that_commits_what_the_fleet_does_not_keeps_no_later_record() -> None:
    """Its answer is lost. The next router would follow its record, though the trainer was told that the push failed."""
    async with linked(2) as fleet:
        await undo(fleet, 3)
        other = fleet.daemons[1]
        async with out_of_rotation(fleet, 1):
            answers = hold_back(fleet.running.router.find(fleet.links[1].address).weights, "CommitPush")
            repeating = asyncio.create_task(repeat(fleet, 3))
            await answers.given.wait()
            assert hold(3, other)
            fleet.links[1].kill()
            with refuses(PushRolledBackError, says="another push_id"):
                await repeating
        assert fleet.running.router.fleet.desired.epoch > other.board.membership.record.epoch


class OpenTwice(asyncio.Event):
    """Lets a push pass, and what undoes its failed commit, but not the router, which catches up for it at once."""

    num_left = 2

    async def wait(self) -> Literal[True]:
        self.num_left -= 1
        return True if self.num_left >= 0 else await super().wait()


@pytest.mark.slow
async def test_a_part_is_not_committed_over_another_version() -> None:
    """A replica that has the bytes of the part, but missed the version it belongs on, fetches the whole."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        part = {"a": weights(3)["a"]}
        await fleet.client.push_weights(part, version=3, partial=True, timeout_s=30, push_id="part", action="stage")
        behind = fleet.daemons[1]
        behind.engine.fails["commit_weights"] = GenserveError("not now")
        behind.engine.gates["prepare_weights"] = Gate(open=OpenTwice())
        await fleet.client.push_weights(weights(2), version=2, timeout_s=30)
        await fleet.client.commit_push("part")
        behind.engine.gates.pop("prepare_weights").open.set()  # the router may be at it
        await fleet.until_ready(2)
        for daemon in fleet.daemons:
            assert daemon.engine.live == {"a": content(3)["a"], "b": content(2)["b"]}


async def test_a_push_under_an_unknown_lease_is_not_in_the_way() -> None:
    """Nothing is prepared for it, and the next push passes."""
    async with routed(2) as fleet:
        with refuses(PauseLeaseLostError):
            await fleet.client.push_weights(weights(1), version=1, pause_lease_id="nobody's", timeout_s=30)
        assert [daemon.engine.calls for daemon in fleet.daemons] == [[], []]
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)


async def test_what_was_staged_is_committed_after_a_replica_has_joined() -> None:
    """The new one fetches the version afterwards."""
    async with routed(2) as fleet, replica() as late:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="s", action="stage")
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        await fleet.client.commit_push("s")
        await fleet.until_ready(3)
        assert all(hold(1, daemon) for daemon in [*fleet.daemons, late])


async def test_a_replica_that_cannot_prepare_what_was_staged_catches_up() -> None:
    """It does not stop the others, as it would with a push that is prepared everywhere first."""
    async with routed(3) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="s", action="stage")
        failing = fleet.daemons[1]
        failing.engine.fails["prepare_weights"] = GenserveError("no room for it")
        gate = failing.engine.gates["commit_weights"] = Gate()
        assert (await fleet.client.commit_push("s")).push.state == "applied"
        assert [hold(1, daemon) for daemon in fleet.daemons] == [True, False, True]
        await until_reached(gate)
        assert fleet.state(failing) is ReplicaState.SYNCING
        gate.open.set()
        await fleet.until_ready(3)
        assert hold(1, failing)


@pytest.mark.slow
async def test_a_push_while_a_replica_fetches_the_version_before() -> None:
    """The fetch gives way."""
    async with routed(2) as fleet, replica() as late:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        gate = late.engine.gates["prepare_weights"] = Gate()
        fleet.running.router.add(late.address)
        await until_reached(gate)
        pushing = asyncio.create_task(fleet.client.push_weights(weights(2), version=2, timeout_s=20))
        await until(lambda: fleet.running.pushes.are_live)
        await fleet.until_reported()
        gate.open.set()
        await pushing
        await fleet.until_ready(3)
        assert all(hold(2, daemon) for daemon in [*fleet.daemons, late])


async def test_a_tainted_replica_fetches_the_version_once_more() -> None:
    """It has applied that push before, and would only repeat its answer; and it is not asked again and again."""
    async with routed(2) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        tainted = fleet.daemons[0]
        tainted.engine.live = {}
        tainted.board.enter(EngineCondition.TAINTED)
        await until(lambda: tainted.engine.live == content(1))
        await fleet.until_ready(2)
        assert tainted.engine.calls.count("commit_weights 1") == 2


async def test_what_was_pushed_to_one_replica_alone_does_not_pass_for_the_fleets() -> None:
    """It bears the number of the fleet's version, which that replica had applied before."""
    async with linked(2) as fleet:
        daemon = fleet.daemons[0]
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30, push_id="p")
        async with AsyncClient(daemon.address) as client:
            await client.push_weights(weights(5), version=1, timeout_s=30, force=True)
        fleet.links[0].cut()
        await until(lambda: hold(1, daemon))
        await fleet.until_ready(2)


async def test_a_stream_without_a_header_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be there for ever. So does one that begins with another frame, as with a daemon."""
    async with over([]) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        with monkeypatch.context() as patched:
            patched.setattr(weight_service, "HEADER_TIMEOUT_S", 0.05)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await WeightServiceStub(channel).PushWeights(timeout=30)
        assert reason_of(caught.value) == "DEADLINE_EXCEEDED" and "header" in str(caught.value.details())
        call = WeightServiceStub(channel).PushWeights(
            iter([weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())]), timeout=30
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert field_of(caught.value) == "frame"


async def test_a_prepared_push_that_says_so_itself_gives_way_on_all_replicas() -> None:
    """A router passes on what its sender has said."""
    async with routed(2) as fleet:
        manifest = manifest_message(CHECKPOINT.as_manifest())
        header = weights_pb2.PushHeader(push_id="first", weight_version=1, manifest=manifest, preemptible=True)
        header.action = weights_pb2.PUSH_ACTION_PREPARE
        async with PacedPush(fleet.running.address, header, data_of(1)) as first:
            first.send(0, manifest.total_bytes)
            await first.end()
        await fleet.client.push_weights(weights(2), version=2, timeout_s=20, push_id="second", action="prepare")
        await fleet.client.commit_push("second")
        assert all(hold(2, daemon) for daemon in fleet.daemons)
