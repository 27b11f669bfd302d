"""Replicas that answer, and of which the router does not know yet what they have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from genserve.errors import LastReplicaError
from genserve.fleet.member import Member
from tests.fleet.routers import QUICK, RoutedFleet, adapting, ended, hold_back, linked, push, shutting_down
from tests.support.patience import STEP_S, turns, until
from tests.support.pulled_peers import weights
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS


def members(fleet: RoutedFleet) -> list[Member]:
    """What the router knows of each replica, in the order of the links."""
    return [fleet.running.router.find(link.address).member for link in fleet.links]


@asynccontextmanager
async def unread(fleet: RoutedFleet) -> AsyncIterator[None]:
    """The router has to ask every replica what it serves, and gets no answer."""
    await fleet.until_reported()  # no earlier answer is on its way
    await fleet.until_ready()
    for link, member in zip(fleet.links, members(fleet), strict=True):
        link.silence()
        member.doubt()
    fleet.running.router.fleet.refresh()
    yield
    for link in fleet.links:
        link.let_go()


async def still_waits(task: "asyncio.Task[object]") -> None:
    """It has had the time to end, and waits."""
    await asyncio.wait({task}, timeout=0.3)
    assert not task.done()


def drain(fleet: RoutedFleet) -> "asyncio.Task[object]":
    """Somebody drains the first replica."""
    return asyncio.create_task(fleet.client.drain_replica(fleet.links[0].address))


async def drain_in_use(fleet: RoutedFleet) -> "asyncio.Task[object]":
    """The same while version 3 is served, and a request runs there that does not end by itself."""
    first = members(fleet)[0]
    await push(fleet.running.address, 3)
    await fleet.until_ready()
    first.sent(1)
    leaving = drain(fleet)
    await until(lambda: first.is_draining)
    return leaving


async def test_the_only_holder_is_not_drained_while_it_is_read() -> None:
    """As after a commit that it has not answered: it would take the version with it."""
    async with linked(1) as fleet:
        await push(fleet.running.address, 3)
        async with unread(fleet):
            leaving = drain(fleet)
            await still_waits(leaving)
        with refuses(LastReplicaError, says="version 3"):
            await leaving


async def test_one_holder_of_two_is_drained_when_both_are_read() -> None:
    """Neither is taken for the only one meanwhile."""
    async with linked(2) as fleet:
        await push(fleet.running.address, 3)
        async with unread(fleet):
            leaving = drain(fleet)
            await still_waits(leaving)
        await leaving
        assert list(fleet.running.router.fleet.upstreams) == [fleet.links[1].address]


async def test_a_drain_goes_on_when_the_version_is_another_one() -> None:
    """It waited because it might be the only holder, in a state that is the same before and after."""
    async with linked(2) as fleet:
        first, _ = members(fleet)
        leaving = await drain_in_use(fleet)
        await push(fleet.running.address, 4)
        assert first.version is not None and first.version.number == 3
        fleet.links[0].silence()
        first.doubt()
        await fleet.running.router.remove(fleet.links[1].address)
        first.ended(1)
        await still_waits(leaving)
        fleet.links[0].let_go()
        await leaving


async def test_a_daemon_that_is_back_in_its_shutdown_is_told_that_it_may_end() -> None:
    """Its connection breaks when it begins; it is in the same state before and after its version is read."""
    async with linked(2) as fleet:
        await push(fleet.running.address, 3)
        await fleet.until_ready()
        fleet.links[0].cut()
        assert await ended(shutting_down(fleet.daemons[0])) == []


async def test_a_partial_push_waits_for_a_replica_that_has_the_version() -> None:
    """It goes to no other ones, and nobody is known to have it."""
    async with linked(2) as fleet:
        await push(fleet.running.address, 1)
        async with unread(fleet):
            part = fleet.client.push_weights({"a": weights(2)["a"]}, version=2, partial=True, timeout_s=30)
            pushing = asyncio.create_task(part)
            await still_waits(pushing)
        assert (await pushing).push.state == "applied"


async def test_a_commit_waits_for_as_many_replicas_as_it_needs() -> None:
    """One of them has the push, and is just being read."""
    async with linked(2, replace(QUICK, min_replicas=2)) as fleet:
        first, _ = members(fleet)
        await fleet.client.push_weights(weights(1), version=1, action="prepare", push_id="p", timeout_s=30)
        answers = hold_back(fleet.running.router.find(first.address).weights, "GetWeights")
        first.doubt()
        fleet.running.router.fleet.refresh()
        await answers.given.wait()
        committing = asyncio.create_task(fleet.client.commit_push("p"))
        await still_waits(committing)
        answers.let_go.set()
        assert (await committing).push.state == "applied"


@pytest.mark.parametrize("serves", [False, True], ids=["idle", "serves"])
async def test_a_drained_only_holder_that_is_lost_for_a_moment_stays(*, serves: bool) -> None:
    """Whoever drains it ends it afterwards, with the version. Its last request ends before, or with the connection."""
    async with linked(2) as fleet:
        first, second = members(fleet)
        leaving = await drain_in_use(fleet)
        fleet.links[1].kill()
        await until(lambda: second.engine is None)
        if not serves:
            first.ended(1)
        await fleet.until_reported()
        num_losses = first.num_losses
        fleet.links[0].cut()
        await until(lambda: first.num_losses > num_losses)
        if serves:
            await turns()
            first.ended(1)
            fleet.running.router.fleet.states_changed.notify()
        await until(lambda: first.is_gone or first.version is not None)
        await still_waits(leaving)
        await fleet.links[1].listen_again()
        await leaving


async def test_a_drained_holder_stays_while_no_replica_answers() -> None:
    """All links of the router break at once, its own to the drained one included, and with it the last request."""
    async with linked(2) as fleet:
        first, second = members(fleet)
        leaving = await drain_in_use(fleet)
        await fleet.until_reported()
        for link in fleet.links:
            link.kill()
        await until(lambda: first.engine is None and second.engine is None)
        first.ended(1)
        fleet.running.router.fleet.states_changed.notify()
        await still_waits(leaving)
        for link in fleet.links:
            await link.listen_again()
        await leaving


async def test_a_drained_only_holder_that_is_dead_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call to it fails at once, which counts as a loss."""
    for name in "watch.FIRST_PAUSE_S", "watch.CALL_AGAIN_S", "router.CALL_AGAIN_S":
        monkeypatch.setattr(f"genserve.fleet.{name}", 0.1)
    async with linked(1, replace(QUICK, silence_s=0.5)) as fleet:
        (only,) = members(fleet)
        await push(fleet.running.address, 3)
        await fleet.until_ready()
        fleet.links[0].kill()
        await until(lambda: only.engine is None)
        async with asyncio.timeout(STEP_S):
            await fleet.running.router.drain(only.address)
        assert only.is_gone


async def test_a_drained_only_holder_is_waited_for_until_it_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router calls it rarely while it is away: more rarely than it may be silent."""
    monkeypatch.setattr("genserve.fleet.watch.FIRST_PAUSE_S", 2.0)  # above silence_s, below what is waited in all
    async with linked(1, replace(QUICK, silence_s=0.5)) as fleet:
        (only,) = members(fleet)
        await push(fleet.running.address, 3)
        await fleet.until_ready()
        only.is_draining = True
        fleet.links[0].cut()
        await until(lambda: only.engine is None)
        leaving = asyncio.create_task(fleet.running.router.drain(only.address))
        await until(lambda: only.is_gone or only.version is not None)
        await still_waits(leaving)


async def test_the_only_holder_of_an_adapter_is_not_drained_before_it_has_told_its_adapters() -> None:
    """It is back, and gets requests already."""
    async with linked(1, opened=adapting) as fleet:
        (only,) = members(fleet)
        await fleet.client.push_lora("poet", TENSORS, CONFIG)
        await fleet.until_reported()
        answers = hold_back(fleet.running.router.find(only.address).control, "ListLoras")
        fleet.links[0].cut()
        await until(lambda: only.engine is None)
        answers.given.clear()
        await answers.given.wait()
        leaving = drain(fleet)
        await still_waits(leaving)
        answers.let_go.set()
        with refuses(LastReplicaError, says="adapter 'poet'"):
            await leaving
