"""Leases that end, or replicas that go, while replicas are paused or resumed."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from genserve.errors import DeadlineError, NoReplicaError
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import linked, over, replica, routed, running, until_reached
from tests.support.patience import until
from tests.support.ports import free_port
from tests.support.refusals import refuses
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
        await fleet.until_reported()
        await until(lambda: late.engine.running)
        assert running(fleet) == [True, True]
        assert not (await fleet.client.status()).state.pauses


@pytest.mark.parametrize("step", ["pause", "sleep"])
async def test_replica_that_joins_during_a_call_to_all_is_called_too(step: str) -> None:
    """It has got requests meanwhile, and the whole fleet is paused, or sleeps, when the caller is told so."""
    async with routed(1) as fleet, replica() as late:
        gate = fleet.daemons[0].engine.gates[step] = Gate()
        call = fleet.client.pause(ttl_s=None) if step == "pause" else fleet.client.sleep(level=1)
        asking = asyncio.create_task(call)
        await until_reached(gate)
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)
        late_gate = late.engine.gates[step] = Gate()
        gate.open.set()
        await until_reached(late_gate)
        for _ in range(10):  # in which an answer would come
            await fleet.client.status()
        assert not asking.done()
        late_gate.open.set()
        await asking
        assert not late.engine.running and bool(late.engine.asleep) is (step == "sleep")


async def test_a_replica_that_was_away_is_resumed_when_it_is_back() -> None:
    """Nobody else would: the holder was told that the lease has ended."""
    async with linked(2) as fleet:
        daemon, link = fleet.daemons[0], fleet.links[0]
        lease_id = (await fleet.client.pause(ttl_s=None)).lease.lease_id
        link.kill()
        await fleet.until_ready(1)
        await fleet.client.resume(lease_id)
        assert not daemon.engine.running
        await link.listen_again()
        await until(lambda: daemon.engine.running)
        await fleet.until_ready(2)


async def test_a_resume_that_failed_on_one_replica_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease has ended for the fleet, so nobody else would let that replica run."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(ttl_s=None)).lease.lease_id
        failing = fleet.daemons[0].pauses

        async def fail(lease_id: str, *, force: bool = False) -> bool:
            raise DeadlineError("not now")

        with monkeypatch.context() as patched, refuses(DeadlineError, says="not now"):
            patched.setattr(failing, "resume", fail)
            await fleet.client.resume(lease_id)
        await until(lambda: running(fleet) == [True, True])


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
        await fleet.until_reported()
        assert running(fleet) == [False, False]
        await fleet.client.resume(again)
        await until(lambda: running(fleet) == [True, True])


async def test_lease_that_ends_before_its_turn_on_a_new_replica_is_skipped() -> None:
    """The sync of the replica goes on: it does not fail, which would cost half a minute."""
    async with routed(2) as fleet, replica() as late:
        lease_ids = [(await fleet.client.pause(request_id=each, no_expiry=True)).lease.lease_id for each in ("a", "b")]
        gate = late.engine.gates["pause"] = Gate()
        fleet.running.router.add(late.address)
        await until_reached(gate)
        await fleet.client.resume(lease_ids[1])
        gate.open.set()
        await until(lambda: not late.engine.running)
        await fleet.until_reported()
        assert fleet.running.router.fleet.upstreams[late.address].member.sync_failure == ""
        await fleet.client.resume(lease_ids[0])
        await until(lambda: late.engine.running)


async def test_a_replica_that_joins_while_others_are_being_paused_is_paused() -> None:
    """As soon as they all are: a pause that still fails does not concern it."""
    async with routed(2) as fleet, replica() as late:
        gate = fleet.daemons[1].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        await fleet.until_reported()
        assert late.engine.running
        gate.open.set()
        await pausing
        await until(lambda: not late.engine.running)


async def test_a_pause_waits_until_the_resume_of_its_lease_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on which it failed would take the pause for a repeat, and then end what the other has granted anew."""
    async with routed(2) as fleet:
        lease_id = (await fleet.client.pause(request_id="own", no_expiry=True)).lease.lease_id
        pauses, gate, failing = fleet.daemons[1].pauses, Gate(), [True]
        resume = pauses.resume

        async def resume_late(lease_id: str, *, force: bool = False) -> bool:
            if failing:
                failing.pop()
                raise DeadlineError("not now")
            gate.reached.set()
            await gate.open.wait()
            return await resume(lease_id, force=force)

        monkeypatch.setattr(pauses, "resume", resume_late)
        with refuses(DeadlineError, says="not now"):
            await fleet.client.resume(lease_id)
        await until_reached(gate)
        pausing = asyncio.create_task(fleet.client.pause(request_id="own", no_expiry=True))
        await fleet.until_reported()
        gate.open.set()
        await pausing
        await fleet.until_reported()
        assert running(fleet) == [False, False]


async def test_a_replica_that_starts_again_while_others_are_paused_is_paused() -> None:
    """It had granted the lease, and the run that did has gone."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        port = free_port()
        daemons = [await first.enter_async_context(replica(port)), await stack.enter_async_context(replica())]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            gate = daemons[1].engine.gates["pause"] = Gate()
            pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
            await until_reached(gate)
            await until(lambda: not daemons[0].engine.running)
            await first.aclose()
            await until(lambda: fleet.state(daemons[0]) is ReplicaState.UNHEALTHY)
            gate.open.set()
            lease_id = (await pausing).lease.lease_id
            again = await stack.enter_async_context(replica(port))
            await until(lambda: not again.engine.running)
            await fleet.client.resume(lease_id)
            await until(lambda: again.engine.running and daemons[1].engine.running)


async def test_a_replica_that_is_removed_fails_neither_a_pause_nor_a_resume() -> None:
    """What it granted is forgotten, so the lease does not outlive those of the others."""
    async with routed(3) as fleet:
        gate = fleet.daemons[2].engine.gates["pause"] = Gate()
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        await until_reached(gate)
        await until(lambda: running(fleet)[:2] == [False, False])
        for each in (fleet.daemons[0], fleet.daemons[2]):  # one that has granted the lease, and one that has not
            await fleet.running.router.remove(each.address)
        lease_id = (await pausing).lease.lease_id
        gate.open.set()
        fleet.running.router.add(fleet.daemons[0].address)
        await fleet.until_ready(2)
        async with fleet.daemons[1].pauses.turn.take():
            resuming = asyncio.create_task(fleet.client.resume(lease_id))
            await until(lambda: fleet.daemons[0].engine.running)
            await fleet.running.router.remove(fleet.daemons[1].address)
            await resuming
        assert fleet.running.router.fleet.leases.known(lease_id) is None


async def test_a_replica_that_was_away_for_a_moment_does_not_fail_a_pause() -> None:
    """It is paused when it is back, which may be before the others are."""
    async with linked(2) as fleet:
        gates = [each.engine.gates.setdefault("pause", Gate()) for each in fleet.daemons]
        pausing = asyncio.create_task(fleet.client.pause(no_expiry=True))
        for gate in gates:
            await until_reached(gate)
        fleet.links[0].kill()
        await fleet.until_ready(1)
        gates[0].open.set()
        await fleet.links[0].listen_again()
        await fleet.until_ready(2)
        gates[1].open.set()
        await pausing
        await until(lambda: running(fleet) == [False] * 2)


async def test_a_resume_that_reaches_no_replica_can_be_repeated() -> None:
    """The router does not know whether they have the lease, and does not say that it has ended."""
    async with linked(1) as fleet:
        daemon, link = fleet.daemons[0], fleet.links[0]
        lease_id = (await fleet.client.pause(no_expiry=True)).lease.lease_id
        link.kill()
        await fleet.until_ready(0)
        with pytest.raises(NoReplicaError):
            await fleet.client.resume(lease_id)
        await link.listen_again()
        await fleet.until_ready(1)
        await fleet.client.resume(lease_id)
        assert daemon.engine.running
