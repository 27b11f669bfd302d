"""One lease pauses all replicas, and outlives the router."""

import time
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, InvalidFieldError, PauseLeaseLostError
from genserve.fleet import leases
from genserve.fleet.member import ReplicaClock
from genserve.routing.replica import ReplicaState
from genserve.v1 import types_pb2
from tests.fleet.reports import clock_of_leases
from tests.fleet.routers import over, replica, routed, running
from tests.support.patience import until
from tests.support.pulled_peers import content, weights
from tests.support.refusals import refuses


async def paused(client: AsyncClient, **options: Any) -> str:
    """The id of a lease."""
    return (await client.pause(**options)).lease.lease_id


async def test_a_pause_stops_all_and_a_resume_lets_all_run() -> None:
    """The status names one lease."""
    async with routed(3) as fleet:
        async with fleet.client.paused(holder="trainer") as lease:
            assert running(fleet) == [False] * 3
            (told,) = (await fleet.client.status()).state.pauses
            assert (told.lease_id, told.holder) == (lease.lease_id, "trainer")
            await until(lambda: fleet.running.router.state().phase == types_pb2.PHASE_PAUSED)
        assert running(fleet) == [True] * 3
        await until(lambda: not fleet.running.router.fleet.leases.active)


async def test_a_pause_that_fails_on_one_replica_is_undone_on_the_others() -> None:
    """With its error."""
    async with routed(3) as fleet:
        fleet.daemons[1].engine.fails["pause"] = DeadlineError("it is stuck")
        with refuses(DeadlineError, says="it is stuck"):
            await fleet.client.pause()
        assert running(fleet) == [True] * 3


async def test_a_push_under_the_lease_leaves_all_paused() -> None:
    """It is applied under the lease of each replica."""
    async with routed(2) as fleet:
        lease_id = await paused(fleet.client, holder="trainer")
        await fleet.client.push_weights(weights(1), version=1, pause_lease_id=lease_id, timeout_s=30)
        assert running(fleet) == [False] * 2
        assert all(daemon.engine.live == content(1) for daemon in fleet.daemons)
        await fleet.client.resume(lease_id)
        assert running(fleet) == [True] * 2


async def test_the_end_of_a_lease_is_by_the_clock_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the answers to a pause and to its renewal, which come before the next report."""
    own_of = ReplicaClock.lease

    def an_hour_ahead(clock: ReplicaClock, lease: types_pb2.PauseLease) -> types_pb2.PauseLease:
        own = types_pb2.PauseLease()
        own.CopyFrom(own_of(clock, lease))
        own.expire_time.FromSeconds(own.expire_time.ToSeconds() - 3600)
        return own

    monkeypatch.setattr(ReplicaClock, "lease", an_hour_ahead)
    async with routed(1) as fleet:
        lease = (await fleet.client.pause(ttl_s=7200)).lease
        renewed = await fleet.client.renew_pause(lease.lease_id, ttl_s=10800)
        for each, left_s in ((lease, 3600), (renewed, 7200)):
            assert each.expire_time is not None
            assert each.expire_time.timestamp() == pytest.approx(time.time() + left_s, abs=60)


async def test_another_router_knows_the_lease() -> None:
    """It renews and ends it, and a repeat of the pause is the same one."""
    async with routed(2) as fleet:
        lease_id = await paused(fleet.client, holder="trainer", request_id="r", ttl_s=60)
        fleet.blind()
        async with over(fleet.daemons) as again:
            await again.until_ready()
            (told,) = (await again.client.status()).state.pauses
            assert (told.lease_id, told.holder) == (lease_id, "trainer")
            assert await paused(again.client, holder="trainer", request_id="r", ttl_s=60) == lease_id
            await again.client.renew_pause(lease_id, ttl_s=30)
            await again.client.resume(lease_id)
            assert running(fleet) == [True] * 2
            with pytest.raises(PauseLeaseLostError):
                await again.client.renew_pause(lease_id)


async def test_a_daemon_that_joins_a_paused_fleet_is_paused_first() -> None:
    """And runs when the lease ends."""
    async with routed(2) as fleet, replica() as late:
        lease_id = await paused(fleet.client, holder="trainer", ttl_s=60)
        fleet.running.router.add(late.address)
        await fleet.until_ready(3)
        assert not late.engine.running
        await fleet.client.resume(lease_id)
        await until(lambda: late.engine.running)


async def test_daemon_joining_in_the_last_second_of_a_lease_gets_no_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not worth a pause of its own, and its tokens would come while the others are paused."""
    monkeypatch.setattr(leases, "LEAST_S", 300.0)
    async with routed(2) as fleet, replica() as late, clock_of_leases() as clock:
        await fleet.client.pause(ttl_s=200)
        fleet.running.router.add(late.address)
        member = fleet.running.router.find(late.address).member
        await until(lambda: member.version is not None)
        await fleet.until_reported()
        assert fleet.state(late) is ReplicaState.SYNCING
        assert late.engine.running and running(fleet) == [False] * 2
        await clock.advance(201)
        await fleet.until_ready(3)
        assert running(fleet) == [True] * 2


async def test_daemon_waiting_for_a_lease_to_end_is_paused_if_it_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on the replicas alone, as they tell it."""
    monkeypatch.setattr(leases, "LEAST_S", 300.0)
    async with routed(2) as fleet, replica() as late:
        await paused(fleet.client, ttl_s=200)
        fleet.running.router.add(late.address)
        member = fleet.running.router.find(late.address).member
        await until(lambda: member.version is not None)
        await fleet.until_reported()
        assert fleet.state(late) is ReplicaState.SYNCING and late.engine.running
        for daemon in fleet.daemons:
            (own,) = daemon.board.state().pauses
            daemon.pauses.renew(own.lease_id, 600)
        await until(lambda: not late.engine.running)
        await fleet.until_ready(3)


async def test_a_lease_that_expires_ends_everywhere() -> None:
    """No replica is paused again because another one still was."""
    async with routed(3) as fleet, clock_of_leases() as clock:
        await fleet.client.pause(ttl_s=600)
        last = fleet.daemons[2]
        (own,) = last.board.state().pauses
        last.pauses.renew(own.lease_id, 6000)
        await clock.advance(601)
        await until(lambda: running(fleet) == [True, True, False])
        (lease,) = fleet.running.router.fleet.leases.active
        await until(lambda: lease.given_up == {daemon.address for daemon in fleet.daemons[:2]})
        await fleet.until_ready()
        await last.pauses.resume(own.lease_id)
        await until(lambda: not fleet.running.router.fleet.leases.active)
        assert running(fleet) == [True] * 3
        assert [sum(call.startswith("pause") for call in daemon.engine.calls) for daemon in fleet.daemons] == [1] * 3


async def test_a_lease_that_the_replicas_lost_just_now_is_told_as_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router holds it until it asks."""

    async def lost(lease_id: str, *, force: bool) -> None:
        raise PauseLeaseLostError(f"no pause lease {lease_id!r} is known")

    async with routed(2) as fleet:
        lease_id = await paused(fleet.client)
        for daemon in fleet.daemons:
            monkeypatch.setattr(daemon.pauses, "resume", lost)
        assert (await fleet.client.resume(lease_id)).lease_expired
        assert not fleet.running.router.fleet.leases.active


async def test_force_ends_every_lease() -> None:
    """Also those that the fleet does not know."""
    async with routed(2) as fleet:
        await fleet.client.pause()
        await fleet.client.pause()
        await fleet.client.resume(force=True)
        assert running(fleet) == [True] * 2


async def test_wrong_leases() -> None:
    """As with one daemon."""
    async with routed(1) as fleet:
        for lease_id in ("unknown", "x" * 300):
            with pytest.raises(PauseLeaseLostError):
                await fleet.client.resume(lease_id)
        with refuses(InvalidFieldError, field="lease_id"):
            await fleet.client.resume("")
        with refuses(InvalidFieldError, field="holder"):
            await fleet.client.pause(holder="x" * 257)
        with refuses(InvalidFieldError, field="ttl"):
            await fleet.client.pause(ttl_s=1e6)
        assert running(fleet) == [True]
