"""A replica that is to end hands the version of the fleet over first."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from genserve.control.conditions import DaemonCondition, EngineCondition
from genserve.errors import LastReplicaError
from genserve.fleet.hand_over import is_sound
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import RoutedFleet, ended, hold, linked, over, push, replica, routed, shutting_down
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


async def test_the_only_holder_ends_when_another_replica_has_the_version() -> None:
    """Which fetches it from the one that shuts down, and serves it then."""
    async with AsyncExitStack() as stack:
        last, joiner = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over([last]) as fleet:
            await fleet.until_ready(1)
            await push(fleet.running.address, 3)
            ending = shutting_down(last)
            await until_draining(fleet, last)
            assert not ending.done()
            fleet.running.router.add(joiner.address)
            assert await ended(ending) == []
            assert hold(3, joiner) and fleet.state(joiner) is ReplicaState.READY


async def until_draining(fleet: RoutedFleet, daemon: Daemon) -> None:
    """Waits until the router knows it, and would have told the daemon if it might end."""
    await until(lambda: fleet.state(daemon) is ReplicaState.DRAINING)
    await fleet.until_reported()


async def test_one_holder_of_two_ends_at_once() -> None:
    """So does one of a fleet to which nobody has pushed."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 3)
        assert await ended(shutting_down(fleet.daemons[0])) == []
    async with routed(1) as fleet:
        assert await ended(shutting_down(fleet.daemons[0])) == []


async def test_the_other_holder_has_to_answer_first() -> None:
    """It may be lost, and the router has not noticed yet."""
    async with linked(2) as fleet:
        leaving, (link, to_leaving) = fleet.daemons[1], fleet.links
        await push(fleet.running.address, 3)
        # A report of the push may make the router ask what it serves.
        await until_told(fleet, link.address)
        await until(lambda: fleet.state_of(link.address) is ReplicaState.READY)
        link.silence()
        ending = shutting_down(leaving)
        member = fleet.running.router.find(to_leaving.address).member
        await until(lambda: fleet.state_of(to_leaving.address) is ReplicaState.DRAINING)
        for _ in range(3):
            before = member.engine
            await until(lambda before=before: member.engine is not before)  # type: ignore[misc]
        assert fleet.state_of(link.address) is ReplicaState.READY and not ending.done()
        assert not member.is_let_go
        link.let_go()
        assert await ended(ending) == []
        await until(lambda: member.is_let_go)  # it is not told again


async def test_a_fleet_of_which_all_replicas_end_waits_for_nobody() -> None:
    """None of them could take the version."""
    async with routed(3) as fleet:
        await push(fleet.running.address, 3)
        endings = [shutting_down(daemon) for daemon in fleet.daemons]
        assert [await ended(each) for each in endings] == [[]] * 3


async def test_the_only_holder_waits_no_longer_than_its_drain_may_take() -> None:
    """It says what is lost."""
    async with routed(1) as fleet:
        await push(fleet.running.address, 3)
        (cut,) = await ended(shutting_down(fleet.daemons[0], 0.2))
        assert "handing over of what was pushed" in cut and "push it again" in cut


async def test_the_only_holder_says_why_it_does_not_end(capsys: pytest.CaptureFixture[str]) -> None:
    """On its stderr, with the router."""
    async with routed(1) as fleet:
        await push(fleet.running.address, 3)
        ending = shutting_down(fleet.daemons[0])
        await until_draining(fleet, fleet.daemons[0])
        said: list[str] = []
        await until(lambda: said.append(capsys.readouterr().err) or "(version 3): waiting until" in "".join(said))  # type: ignore[func-returns-value]
        assert fleet.running.address in "".join(said)
        (listed,) = (await fleet.client.list_replicas()).replicas
        assert "nobody else has version 3" in listed.reason
        ending.cancel()


@pytest.mark.parametrize("pushed", ["through a router", "alone"])
async def test_a_daemon_without_a_router_ends_at_once(pushed: str) -> None:
    """Nobody would bring its version to others: the router has ended, or there was none."""
    async with replica() as daemon:
        if pushed == "alone":
            await push(daemon.address, 3)
        else:
            async with over([daemon]) as fleet:
                await fleet.until_ready(1)
                await push(fleet.running.address, 3)
            await until(lambda: not daemon.board.membership.router_address)
        assert await ended(shutting_down(daemon)) == []


async def test_a_replica_that_shuts_down_is_no_other_copy() -> None:
    """The remaining one is not drained: the version would end with both."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 1)
        first, second = fleet.daemons
        first.board.become(DaemonCondition.DRAINING)
        await until(lambda: fleet.state(first) is ReplicaState.DRAINING)
        with refuses(LastReplicaError, says="version 1"):
            await fleet.client.drain_replica(second.address)


async def test_a_drained_replica_that_becomes_the_only_holder_hands_over() -> None:
    """It was allowed to go while there were two."""
    async with replica() as joiner, linked(2) as fleet:
        other, first = fleet.links
        await push(fleet.running.address, 4)
        member = fleet.running.router.find(first.address).member
        member.sent(1)
        draining = asyncio.create_task(fleet.client.drain_replica(first.address))
        await until(lambda: member.is_draining)
        other.kill()
        await until(lambda: not fleet.running.router.fleet.ready)
        member.ended(1)
        fleet.running.router.fleet.states_changed.notify()
        await fleet.until_reported()
        assert not draining.done() and not member.is_gone
        fleet.running.router.add(joiner.address)
        async with asyncio.timeout(STEP_S):
            await draining
        assert hold(4, joiner) and member.is_gone


@pytest.mark.parametrize("condition", [EngineCondition.TAINTED, EngineCondition.DEAD])
async def test_a_replica_without_sound_weights_is_no_other_copy(condition: EngineCondition) -> None:
    """It is about to end, or nobody can fetch anything from it: the version would end with the one that shuts down."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 3)
        first, second = fleet.daemons
        gate = second.engine.gates["prepare_weights"] = Gate()  # a tainted one is not mended meanwhile
        second.board.enter(condition)
        member = fleet.running.router.find(second.address).member
        await until(lambda: member.engine is not None and not is_sound(member.engine))
        with refuses(LastReplicaError, says="version 3"):
            await fleet.client.drain_replica(first.address)
        ending = shutting_down(first)
        await until_draining(fleet, first)
        assert not ending.done()
        ending.cancel()
        gate.open.set()


async def test_a_drained_replica_stays_until_another_holder_has_answered() -> None:
    """Whoever has it drained ends it then, and the other one may be lost already."""
    async with linked(2) as fleet:
        link, first = fleet.links
        await push(fleet.running.address, 3)
        link.silence()
        draining = asyncio.create_task(fleet.client.drain_replica(first.address))
        member = fleet.running.router.find(first.address).member
        await until(lambda: member.is_draining)
        await until_told(fleet, first.address)
        assert fleet.state_of(link.address) is ReplicaState.READY and not draining.done() and not member.is_gone
        link.let_go()
        async with asyncio.timeout(STEP_S):
            await draining
        assert member.is_gone


async def test_a_drain_that_waits_ends_when_it_is_forced() -> None:
    """Also if nothing else happens in the fleet."""
    async with routed(2) as fleet:
        await push(fleet.running.address, 3)
        first, second = fleet.daemons
        member = fleet.running.router.find(first.address).member
        member.sent(1)
        draining = asyncio.create_task(fleet.client.drain_replica(first.address))
        await until(lambda: member.is_draining)
        await fleet.running.router.remove(second.address)
        member.ended(1)
        fleet.running.router.fleet.states_changed.notify()
        await fleet.until_reported()
        assert not draining.done()
        async with asyncio.timeout(STEP_S):
            await fleet.client.drain_replica(first.address, force=True)
            await draining


@pytest.mark.parametrize("what", ["it ends as well", "it serves something else"])
async def test_the_other_holder_has_to_have_the_version(what: str) -> None:
    """It answers, and the router has not noticed yet that this is all it does."""
    async with AsyncExitStack() as stack:
        first, other = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over([first, other]) as fleet:
            await fleet.until_ready(2)
            await push(fleet.running.address, 3)
            await fleet.until_reported()
            fleet.unwatched(other)
            if what == "it ends as well":
                other.board.become(DaemonCondition.DRAINING)
            else:
                await push(other.address, 4)
            ending = shutting_down(first)
            await until_told(fleet, first.address)
            assert not ending.done()
            ending.cancel()


async def until_told(fleet: RoutedFleet, address: str) -> None:
    """Waits until a replica has told its state three times: what must not happen would have."""
    member = fleet.running.router.find(address).member
    for _ in range(3):
        before = member.engine
        await until(lambda: member.engine is not before)  # noqa: B023


async def test_a_connection_that_breaks_does_not_end_the_only_holder() -> None:
    """Its router comes back a moment later, and the version would be gone."""
    async with replica() as joiner, linked(1) as fleet:
        last, link = fleet.daemons[0], fleet.links[0]
        await push(fleet.running.address, 3)
        ending = shutting_down(last)
        await until(lambda: fleet.state_of(link.address) is ReplicaState.DRAINING)
        member = fleet.running.router.find(link.address).member
        num_losses = member.num_losses
        link.cut()
        await until(lambda: ending.done() or (member.num_losses > num_losses and member.version is not None))
        assert not ending.done()
        fleet.running.router.add(joiner.address)
        assert await ended(ending) == []
        assert hold(3, joiner)
