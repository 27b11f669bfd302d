"""Pauses and resumes that are cancelled, or that fail, or that meet each other: what they leave behind."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from genserve.errors import DeadlineError, DrainingError, GenserveError, PauseLeaseLostError
from genserve.fleet import serve
from tests.fleet.reports import clock_of_leases, entered
from tests.fleet.routers import over, replica, routed, running, until_reached
from tests.support.patience import until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate


async def cancelled(call: "asyncio.Task[Any]") -> None:
    """Ends a call, as a client that is killed does."""
    call.cancel()
    with suppress(asyncio.CancelledError, GenserveError):
        await call


async def test_a_pause_that_nobody_waits_for_pauses_nothing() -> None:
    """Nobody knows its lease, and it would have no end."""
    async with routed(3) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(ttl_s=None))
        await until_reached(gate)
        await until(lambda: not fleet.daemons[0].engine.running)
        await cancelled(pausing)
        await until(lambda: fleet.daemons[0].engine.running)  # the router is undoing it
        gate.open.set()
        await until(lambda: running(fleet) == [True] * 3)
        await fleet.until_reported()
        assert running(fleet) == [True] * 3
        assert not (await fleet.client.status()).state.pauses


async def test_a_repeat_that_nobody_waits_for_leaves_the_lease_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one daemon: its holder relies on it."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own")).lease.lease_id
        asked = entered(monkeypatch, fleet.daemons[1].pauses, "pause")
        async with fleet.daemons[1].pauses.turn.take():  # its answer does not come
            repeating = asyncio.create_task(fleet.client.pause(request_id="own"))
            await until(asked.is_set)
            await cancelled(repeating)
            await fleet.until_reported()
        await fleet.until_reported()
        assert running(fleet) == [False, False]
        await fleet.client.renew_pause(lease_id)


async def test_a_pause_that_is_repeated_after_its_cancellation_lasts() -> None:
    """Who repeats it is told that it is granted: what undoes the first call must not end it."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(request_id="own"))
        await until_reached(gate)
        await cancelled(pausing)
        repeating = asyncio.create_task(fleet.client.pause(request_id="own"))
        await fleet.until_reported()
        gate.open.set()
        lease_id = (await repeating).lease.lease_id
        await fleet.until_reported()
        assert running(fleet) == [False, False]
        await fleet.client.resume(lease_id)
        assert running(fleet) == [True, True]


async def test_a_repeat_that_is_cancelled_too_pauses_nothing() -> None:
    """Nobody was told the lease."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        for _ in range(2):
            pausing = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
            await until_reached(gate)
            await fleet.until_reported()
            await cancelled(pausing)
        gate.open.set()
        await until(lambda: running(fleet) == [True, True])
        await fleet.until_reported()
        assert not any(daemon.board.state().pauses for daemon in fleet.daemons)
        # The fleet can be paused again by the same call.
        await fleet.client.pause(request_id="own")
        assert running(fleet) == [False, False]


async def test_a_repeat_of_an_expired_pause_that_nobody_waits_for_pauses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replicas grant a new lease, though the router was not told yet that the old one has expired."""
    async with routed(2) as fleet, clock_of_leases() as clock:
        await fleet.client.pause(request_id="own", ttl_s=600)
        asked = [entered(monkeypatch, daemon.pauses, "pause") for daemon in fleet.daemons]
        async with fleet.daemons[0].pauses.turn.take(), fleet.daemons[1].pauses.turn.take():
            await clock.advance(601)  # no lease is ended meanwhile, so none is told to be
            repeating = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
            await until(lambda: all(each.is_set() for each in asked))
            await cancelled(repeating)
            await fleet.until_reported()
        await until(lambda: running(fleet) == [True, True])
        await fleet.until_reported()
        assert running(fleet) == [True, True]


async def test_a_cancelled_pause_waits_for_no_replica() -> None:
    """One that hangs would keep the others paused."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True, timeout_s=3600))
        await until_reached(gate)
        await until(lambda: not fleet.daemons[0].engine.running)
        await cancelled(pausing)
        await until(lambda: fleet.daemons[0].engine.running)
        gate.open.set()
        await until(lambda: running(fleet) == [True, True])


async def test_a_pause_that_failed_and_could_not_be_undone_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for it was told that nothing is paused."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        fleet.daemons[1].engine.fails["pause"] = DeadlineError("it is stuck")

        async def fail(lease_id: str, *, force: bool = False) -> bool:
            monkeypatch.undo()
            raise DeadlineError("not now")

        monkeypatch.setattr(fleet.daemons[0].pauses, "resume", fail)
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        await until(lambda: not fleet.daemons[0].engine.running)
        gate.open.set()
        with refuses(DeadlineError, says="it is stuck"):
            await pausing
        await until(lambda: running(fleet) == [True, True])


async def test_a_resume_that_nobody_waits_for_is_carried_out() -> None:
    """The router does not say any more that the fleet is paused."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(no_expiry=True)).lease.lease_id
        async with fleet.daemons[0].pauses.turn.take(), fleet.daemons[1].pauses.turn.take():
            resuming = asyncio.create_task(fleet.client.resume(lease_id))
            await until(lambda: not fleet.running.router.fleet.leases.active)
            await cancelled(resuming)
            await fleet.until_reported()
        await until(lambda: running(fleet) == [True, True])


@pytest.mark.parametrize("force", [False, True])
async def test_a_resume_does_not_wait_for_a_repeat_of_its_pause(
    monkeypatch: pytest.MonkeyPatch, *, force: bool
) -> None:
    """That is not answered by one replica. It is told that the lease has ended, and none is left."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own", no_expiry=True)).lease.lease_id
        asked = entered(monkeypatch, fleet.daemons[1].pauses, "pause")
        async with fleet.daemons[1].pauses.turn.take():
            repeating = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
            await until(asked.is_set)
            resuming = asyncio.create_task(fleet.client.resume("" if force else lease_id, force=force))
            await until(lambda: fleet.daemons[0].engine.running)
        await resuming
        with pytest.raises(PauseLeaseLostError):
            await repeating
        await until(lambda: running(fleet) == [True, True])
        await fleet.until_reported()
        assert running(fleet) == [True, True]
        assert not any(each.board.state().pauses for each in fleet.daemons)
        await fleet.client.pause(request_id="own")
        assert running(fleet) == [False, False]


async def test_a_forced_resume_ends_a_pause_that_is_being_granted() -> None:
    """Otherwise it would stand on some replicas only."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        await until(lambda: not fleet.daemons[0].engine.running)
        resuming = asyncio.create_task(fleet.client.resume(force=True))
        await until(lambda: fleet.daemons[0].engine.running)
        gate.open.set()
        await resuming
        with pytest.raises(PauseLeaseLostError):
            await pausing
        await until(lambda: running(fleet) == [True, True])


@pytest.mark.parametrize("force", [False, True])
async def test_a_pause_waits_for_the_resume_of_its_lease(monkeypatch: pytest.MonkeyPatch, *, force: bool) -> None:
    """A replica that is yet to be resumed would take it for a repeat, and end what the others have granted anew."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own", no_expiry=True)).lease.lease_id
        pauses, gate = fleet.daemons[1].pauses, Gate()
        resume = pauses.resume

        async def resume_late(lease_id: str, *, force: bool = False) -> bool:
            gate.reached.set()
            await gate.open.wait()
            return await resume(lease_id, force=force)

        monkeypatch.setattr(pauses, "resume", resume_late)
        resuming = asyncio.create_task(fleet.client.resume("" if force else lease_id, force=force))
        await until_reached(gate)
        pausing = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
        await fleet.until_reported()
        gate.open.set()
        await resuming
        await pausing
        await fleet.until_reported()
        assert running(fleet) == [False, False]


@pytest.mark.parametrize("drains_first", [False, True])
async def test_a_router_that_drains_undoes_what_nobody_waits_for(*, drains_first: bool) -> None:
    """The next router would find the lease, and pause the whole fleet for it."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            gate = daemons[1].engine.gates["pause"] = Gate()
            pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
            await until_reached(gate)
            await until(lambda: not daemons[0].engine.running)
            async with daemons[0].pauses.turn.take():
                if drains_first:
                    draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
                    await until(lambda: fleet.running.router.is_draining)
                    await cancelled(pausing)
                else:
                    await cancelled(pausing)
                    draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
                await until(lambda: fleet.running.router.is_draining)
                await fleet.until_reported()
                assert not draining.done()
            await draining
            assert daemons[0].engine.running
        gate.open.set()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_router_that_must_end_undoes_what_it_can(monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
    """A pause is in flight when the time of the drain is over. A replica that does not answer does not keep it."""
    monkeypatch.setattr(serve, "CLOSE_GRACE_S", 10.0)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over(daemons) as fleet, clock_of_leases() as clock:
            await fleet.until_ready()
            gate = daemons[1].engine.gates["pause"] = Gate()
            pausing = asyncio.create_task(fleet.client.pause(no_expiry=True, timeout_s=3600))
            await until_reached(gate)
            await until(lambda: not daemons[0].engine.running)
            async with daemons[0].pauses.turn.take():
                draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
                await until(lambda: fleet.running.router.is_draining)
                await clock.advance(61)
                await asyncio.wait({pausing})
                await fleet.until_reported()
                assert not draining.done()
                if not answers:
                    await clock.advance(11)
                    await until(draining.done)
            await draining
            assert daemons[0].engine.running is answers
            with pytest.raises(GenserveError):
                await pausing
        gate.open.set()


async def test_draining_router_ends_the_lease_of_an_abandoned_resume() -> None:
    """Its holder may have gone for good."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            lease_id = (await fleet.client.pause(no_expiry=True)).lease.lease_id
            async with daemons[0].pauses.turn.take(), daemons[1].pauses.turn.take():
                resuming = asyncio.create_task(fleet.client.resume(lease_id))
                await until(lambda: not fleet.running.router.fleet.leases.active)
                await cancelled(resuming)
                draining = asyncio.create_task(fleet.running.drain(fleet.stopped, 60))
                await until(lambda: fleet.running.router.is_draining)
                await fleet.until_reported()
                assert not draining.done()
            await draining
            assert running(fleet) == [True, True]


async def test_a_resume_that_is_repeated_is_answered_as_before() -> None:
    """Whoever repeats it because an answer was lost is not told that the engine may have run."""
    async with routed(1) as fleet:
        lease_ids = [(await fleet.client.pause(no_expiry=True)).lease.lease_id for _ in range(2)]
        assert [(await fleet.client.resume(lease_ids[0])).lease_expired for _ in range(2)] == [False, False]
        await fleet.client.resume(force=True)
        assert [(await fleet.client.resume(lease_ids[1])).lease_expired for _ in range(2)] == [True, True]


async def test_a_replica_that_shuts_down_does_not_fail_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are paused, and so is the one that starts in its place."""
    async with routed(2) as fleet:

        async def refuse(*arguments: Any, **options: Any) -> Any:
            raise DrainingError("it is shutting down")

        monkeypatch.setattr(fleet.daemons[1].pauses, "pause", refuse)
        await fleet.client.pause(no_expiry=True)
        assert running(fleet) == [False, True]
        monkeypatch.undo()
        await until(lambda: running(fleet) == [False, False])
