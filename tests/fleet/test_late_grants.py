"""Leases that a replica granted, whose answers are taken when it is lost: its calls and its watch end at once, and
either may be noticed first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from genserve.errors import UnavailableError
from genserve.fleet.upstream import Upstream
from genserve.routing.replica import ReplicaState
from tests.fleet.reports import clock_of_leases, entered
from tests.fleet.routers import RoutedFleet, linked, over, replica, routed, running, until_reached
from tests.support.patience import until
from tests.support.ports import free_port
from tests.support.scripted_engine import Gate


class LateAnswer:
    """The answer of a call: it has come when the gate is reached, so no cancellation ends the call any more, and is
    taken when the gate is open."""

    def __init__(self, call: Awaitable[Any], gate: Gate) -> None:
        self._call = call
        self._gate = gate

    def cancel(self) -> bool:
        return False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._taken().__await__()

    async def _taken(self) -> Any:
        answer = await self._call
        self._gate.reached.set()
        await self._gate.open.wait()
        return answer


def answers_late(monkeypatch: pytest.MonkeyPatch, upstream: Upstream, call: str) -> Gate:
    """The next answer to this call of ControlService is taken late."""
    gate, real = Gate(), getattr(upstream.control, call)

    def late(*args: Any, **options: Any) -> LateAnswer:
        monkeypatch.setattr(upstream.control, call, real)
        return LateAnswer(real(*args, **options), gate)

    monkeypatch.setattr(upstream.control, call, late)
    return gate


class Lost:
    """A replica that is lost and starts again at the same address, beside one that stays."""

    def __init__(self, fleet: RoutedFleet, port: int, run: AsyncExitStack) -> None:
        self.fleet = fleet
        self.upstream = fleet.running.router.fleet.upstreams[fleet.daemons[0].address]
        self._port = port
        self._run = run

    async def ends(self) -> None:
        """Returns when the router knows."""
        await self._run.aclose()
        await until(lambda: self.fleet.state(self.fleet.daemons[0]) is ReplicaState.UNHEALTHY)

    async def starts(self) -> None:
        self.fleet.daemons[0] = await self._run.enter_async_context(replica(self._port))


@asynccontextmanager
async def losing() -> AsyncIterator[Lost]:
    """Two replicas that are ready, of which the first one will be lost."""
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(AsyncExitStack())
        port = free_port()
        daemons = [await run.enter_async_context(replica(port)), await stack.enter_async_context(replica())]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            yield Lost(fleet, port, run)


async def test_a_grant_that_is_taken_when_its_replica_is_lost_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run at that address has no lease, and nobody has ended one there: it is paused, too."""
    async with losing() as lost:
        fleet = lost.fleet
        gate = answers_late(monkeypatch, lost.upstream, "Pause")
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        await lost.ends()
        gate.open.set()
        lease_id = (await pausing).lease.lease_id
        await lost.starts()
        await until(lambda: running(fleet) == [False, False])
        await fleet.client.resume(lease_id)
        await until(lambda: running(fleet) == [True, True])


async def test_a_renewal_that_is_taken_when_its_replica_is_lost_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica has renewed it."""
    async with losing() as lost:
        fleet = lost.fleet
        lease_id = (await fleet.client.pause(ttl_s=600)).lease.lease_id
        gate = answers_late(monkeypatch, lost.upstream, "RenewPause")
        renewing = asyncio.create_task(fleet.client.renew_pause(lease_id))
        await until_reached(gate)
        await lost.ends()
        gate.open.set()
        await renewing
        await lost.starts()
        await until(lambda: running(fleet) == [False, False])


async def test_a_grant_to_a_replica_that_joins_and_is_lost_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused at its next start."""
    async with losing() as lost:
        fleet = lost.fleet
        await lost.ends()
        await fleet.client.pause(no_expiry=True)
        gate = answers_late(monkeypatch, lost.upstream, "Pause")
        await lost.starts()
        await until_reached(gate)
        await lost.ends()
        gate.open.set()
        await lost.starts()
        await until(lambda: running(fleet) == [False, False])


async def test_a_pause_that_breaks_before_the_watch_does_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica was away for a moment, and is back before the others are paused."""
    async with linked(2) as fleet:
        link = fleet.links[0]
        broken = asyncio.Event()

        async def breaks() -> None:
            broken.set()
            raise UnavailableError("the connection broke")

        def pause_breaks(*args: Any, **options: Any) -> "asyncio.Task[None]":
            monkeypatch.undo()
            return asyncio.create_task(breaks())

        monkeypatch.setattr(fleet.running.router.fleet.upstreams[link.address].control, "Pause", pause_breaks)
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        await broken.wait()
        link.kill()
        await fleet.until_ready(1)
        await link.listen_again()
        await fleet.until_ready(2)
        gate.open.set()
        await pausing
        await until(lambda: running(fleet) == [False] * 2)


async def test_repeat_of_expired_pause_ends_its_unreported_new_grant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replicas had granted it before they were told that nobody waits for it, and the router knew the old lease."""
    async with routed(2) as fleet, clock_of_leases() as clock:
        await fleet.client.pause(request_id="own", ttl_s=600)
        gates = [answers_late(monkeypatch, each, "Pause") for each in fleet.running.router.fleet.upstreams.values()]
        asked = [entered(monkeypatch, daemon.pauses, "pause") for daemon in fleet.daemons]
        async with fleet.daemons[0].pauses.turn.take(), fleet.daemons[1].pauses.turn.take():
            await clock.advance(601)  # no lease is ended meanwhile, so none is told to be
            repeating = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
            await until(lambda: all(each.is_set() for each in asked))
        for gate in gates:
            await until_reached(gate)
        repeating.cancel()
        with suppress(asyncio.CancelledError):
            await repeating
        await until(lambda: running(fleet) == [True, True])
