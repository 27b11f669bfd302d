"""Replicas that are there, and do not answer a call: none of them waits without an end."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, FleetPushError, StagingFullError
from genserve.fleet.push import fleet_push, spread
from tests.fleet.reports import time_passes
from tests.fleet.routers import QUICK, replica, routed
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.pulled_peers import content, weights
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate

TWO_SUFFICE = replace(QUICK, min_replicas=2)
LIMIT_S = 25.0
"""Below the deadline of any call that a test does not shorten, and far above what a busy machine takes."""


async def hang(*_: Any) -> None:
    """Opens no push, and does not say so."""
    await asyncio.Event().wait()


async def refuse(*_: Any) -> None:
    """Opens no push, and says so."""
    raise StagingFullError("no room for it")


async def test_a_replica_that_does_not_end_its_fetch_fails_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch is answered all the while. The next push passes."""
    async with routed(2) as fleet:
        with monkeypatch.context() as patched:
            patched.setattr(spread, "FETCH_S", 0.3)
            patched.setattr(fleet.daemons[1].registry, "open", hang)
            with refuses(FleetPushError, says=f"{fleet.daemons[1].address}: "):
                await fleet.client.push_weights(weights(1), version=1, timeout_s=LIMIT_S)
        await fleet.client.push_weights(weights(2), version=2, timeout_s=LIMIT_S)
        assert [daemon.engine.live for daemon in fleet.daemons] == [content(2)] * 2


async def test_a_load_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the caller would wait for it. The next push passes."""
    async with replica() as outside, routed(2) as fleet:
        async with AsyncClient(outside.address) as client:
            await client.push_weights(weights(4), version=4, timeout_s=LIMIT_S)
        with monkeypatch.context() as patched:
            patched.setattr(fleet_push, "FETCH_S", 0.3)
            patched.setattr(fleet.daemons[0].registry, "open", hang)
            with pytest.raises(DeadlineError):
                async with asyncio.timeout(LIMIT_S):
                    await fleet.client.load_weights(peers=[outside.address], timeout_s=None)
        await fleet.client.load_weights(peers=[outside.address], timeout_s=LIMIT_S)
        assert [daemon.engine.live for daemon in fleet.daemons] == [content(4)] * 2


async def test_a_replica_whose_parent_refuses_a_push_fetches_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: it does not wait for a parent that will not have it."""
    async with routed(3, TWO_SUFFICE) as fleet:
        monkeypatch.setattr(fleet.daemons[1].registry, "open", refuse)
        await fleet.client.push_weights(weights(1), version=1, timeout_s=LIMIT_S)
        assert [fleet.daemons[number].engine.live for number in (0, 2)] == [content(1)] * 2


async def test_a_replica_whose_parent_hangs_fetches_a_push_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over in which all should have heard of it."""
    async with routed(3, TWO_SUFFICE) as fleet:
        monkeypatch.setattr(fleet.daemons[1].registry, "open", hang)
        with advanced_clock() as clock:
            pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=3600))
            await until(lambda: bool(fleet.daemons[0].engine.prepared))
            await time_passes(clock, fleet.running.router.fleet, 31.0)
            await until(lambda: bool(fleet.daemons[2].engine.prepared))
            await time_passes(clock, fleet.running.router.fleet, TWO_SUFFICE.straggler_s)  # for the one that hangs
            await pushing
        assert [fleet.daemons[number].engine.live for number in (0, 2)] == [content(1)] * 2


async def test_a_push_is_given_up_before_the_first_replica_drops_it() -> None:
    """Which keeps what it has prepared for so long, while the other one prepares it. The next push passes."""
    async with routed(2) as fleet:
        gate = fleet.daemons[1].engine.gates["prepare_weights"] = Gate()
        with advanced_clock() as clock:
            pushing = asyncio.create_task(
                fleet.client.push_weights(weights(1), version=1, prepared_ttl_s=200.0, timeout_s=3600)
            )
            await until(lambda: bool(fleet.daemons[0].engine.prepared) and gate.reached.is_set())
            await fleet.until_reported()
            await time_passes(clock, fleet.running.router.fleet, 195.0)
            gate.open.set()
            with refuses(FleetPushError, says=f"{fleet.daemons[1].address}: "):
                await pushing
        await fleet.client.push_weights(weights(2), version=2, timeout_s=LIMIT_S)
        assert [daemon.engine.live for daemon in fleet.daemons] == [content(2)] * 2
