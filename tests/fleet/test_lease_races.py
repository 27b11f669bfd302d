"""Leases that end, or replicas that go, while replicas are paused or resumed."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from genserve.errors import DeadlineError, GenserveError
from tests.fleet.routers import over, replica, routed, running, until_reached
from tests.support.breakable_link import BreakableLink
from tests.support.scripted_engine import Gate


async def test_a_lease_that_ends_while_a_replica_joins_stays_ended() -> None:
    """The replica that was being paused runs again, and no other one is paused by it."""
    async with routed(2) as fleet, replica() as late:
        lease_id = (await fleet.client.pause(holder="trainer", ttl_s=None)).lease.lease_id
        gate = late.engine.gates["pause"] = Gate()
        fleet.running.router.add(late.address)
        await until_reached(gate)
        await fleet.client.resume(lease_id)
        gate.open.set()
        await fleet.until_ready(3)
        await asyncio.sleep(0.5)
        await fleet.until(lambda: late.engine.running)
        assert running(fleet) == [True, True]
        assert not (await fleet.client.status()).state.pauses


async def test_a_replica_that_was_away_is_resumed_when_it_is_back() -> None:
    """Nobody else would: the holder was told that the lease has ended."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            lease_id = (await fleet.client.pause(ttl_s=None)).lease.lease_id
            link.kill()
            await fleet.until_ready(1)
            await fleet.client.resume(lease_id)
            assert not daemons[1].engine.running
            await link.listen_again()
            await fleet.until(lambda: daemons[1].engine.running)
            await fleet.until_ready(2)


async def test_a_resume_that_failed_on_one_replica_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease has ended for the fleet, so nobody else would let that replica run."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(ttl_s=None)).lease.lease_id
        failing = fleet.daemons[0].pauses

        async def fail(lease_id: str, *, force: bool = False) -> bool:
            monkeypatch.undo()
            raise DeadlineError("not now")

        monkeypatch.setattr(failing, "resume", fail)
        with pytest.raises(DeadlineError, match="not now"):
            await fleet.client.resume(lease_id)
        await fleet.until(lambda: running(fleet) == [True, True])


async def test_a_pause_that_nobody_waits_for_pauses_nothing() -> None:
    """Nobody knows its lease, and it would have no end."""
    async with routed(3) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(ttl_s=None))
        await until_reached(gate)
        await fleet.until(lambda: not fleet.daemons[0].engine.running)
        pausing.cancel()
        with suppress(asyncio.CancelledError, GenserveError):
            await pausing
        await asyncio.sleep(0.3)
        gate.open.set()
        await fleet.until(lambda: running(fleet) == [True] * 3)
        await asyncio.sleep(0.5)
        assert running(fleet) == [True] * 3
        assert not (await fleet.client.status()).state.pauses


async def test_a_repeat_that_nobody_waits_for_leaves_the_lease_that_was_there() -> None:
    """As with one daemon: its holder relies on it."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own")).lease.lease_id
        async with fleet.daemons[1].pauses.turn.take():  # its answer does not come
            repeating = asyncio.create_task(fleet.client.pause(request_id="own"))
            await asyncio.sleep(0.3)
            repeating.cancel()
            with suppress(asyncio.CancelledError, GenserveError):
                await repeating
        await asyncio.sleep(0.5)
        assert running(fleet) == [False, False]
        await fleet.client.renew_pause(lease_id)


async def test_a_pause_that_is_repeated_after_its_cancellation_lasts() -> None:
    """Who repeats it is told that it is granted: what undoes the first call must not end it."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(request_id="own"))
        await until_reached(gate)
        pausing.cancel()
        with suppress(asyncio.CancelledError, GenserveError):
            await pausing
        repeating = asyncio.create_task(fleet.client.pause(request_id="own"))
        await asyncio.sleep(0.3)
        gate.open.set()
        lease_id = (await repeating).lease.lease_id
        await asyncio.sleep(0.5)
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
            await asyncio.sleep(0.3)
            pausing.cancel()
            with suppress(asyncio.CancelledError, GenserveError):
                await pausing
        gate.open.set()
        await fleet.until(lambda: running(fleet) == [True, True])
        await asyncio.sleep(0.3)
        assert not any(daemon.board.state().pauses for daemon in fleet.daemons)
        # The fleet can be paused again by the same call.
        await fleet.client.pause(request_id="own")
        assert running(fleet) == [False, False]


async def test_a_repeat_of_an_expired_pause_that_nobody_waits_for_pauses_nothing() -> None:
    """The replicas grant a new lease, though the router was not told yet that the old one has expired."""
    async with routed(2) as fleet:
        await fleet.client.pause(request_id="own", ttl_s=1.0)
        async with fleet.daemons[0].pauses.turn.take(), fleet.daemons[1].pauses.turn.take():
            await asyncio.sleep(1.2)  # no lease is ended meanwhile, so none is told to be
            repeating = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
            await asyncio.sleep(0.3)
            repeating.cancel()
            with suppress(asyncio.CancelledError, GenserveError):
                await repeating
            await asyncio.sleep(0.1)
        await fleet.until(lambda: running(fleet) == [True, True])
        await asyncio.sleep(0.3)
        assert running(fleet) == [True, True]


async def test_a_lease_that_is_granted_again_while_another_is_made_up_for_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two resumes failed on one replica. Until the first is made up for, the second lease may be somebody's again."""
    async with routed(2) as fleet:
        lease_ids = [(await fleet.client.pause(request_id=each, ttl_s=None)).lease.lease_id for each in ("a", "b")]
        pauses, gate, failing = fleet.daemons[0].pauses, Gate(), list(lease_ids)
        resume = pauses.resume

        async def resume_late(lease_id: str, *, force: bool = False) -> bool:
            if failing:
                failing.pop()
                raise DeadlineError("not now")
            gate.reached.set()
            await gate.open.wait()
            return await resume(lease_id, force=force)

        monkeypatch.setattr(pauses, "resume", resume_late)
        await asyncio.gather(*map(fleet.client.resume, lease_ids), return_exceptions=True)
        await until_reached(gate)
        again = (await fleet.client.pause(request_id="b")).lease.lease_id
        gate.open.set()
        await asyncio.sleep(0.5)
        assert running(fleet) == [False, False]
        await fleet.client.resume(again)
        await fleet.until(lambda: running(fleet) == [True, True])


async def test_a_lease_that_ends_before_its_turn_on_a_replica_that_joins_is_passed_over() -> None:
    """The sync of the replica goes on: it does not fail, which would cost half a minute."""
    async with routed(2) as fleet, replica() as late:
        lease_ids = [(await fleet.client.pause(request_id=each, no_expiry=True)).lease.lease_id for each in ("a", "b")]
        gate = late.engine.gates["pause"] = Gate()
        fleet.running.router.add(late.address)
        await until_reached(gate)
        await fleet.client.resume(lease_ids[1])
        gate.open.set()
        await fleet.until(lambda: not late.engine.running)
        await asyncio.sleep(0.5)
        assert fleet.running.router.fleet.upstreams[late.address].member.sync_failure == ""
        await fleet.client.resume(lease_ids[0])
        await fleet.until(lambda: late.engine.running)


async def test_a_resume_overtakes_no_repeat_on_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that resumed first would grant the lease again, and nobody would end it there."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own", no_expiry=True)).lease.lease_id
        pauses, gate = fleet.daemons[1].pauses, Gate()
        pause = pauses.pause

        async def pause_late(*arguments: Any, **options: Any) -> Any:
            gate.reached.set()
            await gate.open.wait()
            return await pause(*arguments, **options)

        monkeypatch.setattr(pauses, "pause", pause_late)
        repeating = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
        await until_reached(gate)
        resuming = asyncio.create_task(fleet.client.resume(lease_id))
        await asyncio.wait({resuming}, timeout=1.0)
        gate.open.set()
        assert (await repeating).lease.lease_id == lease_id
        await resuming
        await fleet.until(lambda: running(fleet) == [True, True])
        await asyncio.sleep(0.5)
        assert running(fleet) == [True, True]
        assert not (await fleet.client.status()).state.pauses
