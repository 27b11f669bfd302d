"""What the router brings to a replica, and pushes that come meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from genserve.client import AsyncClient
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import RoutedFleet, adapting, hold, over, push, until_reached
from tests.support.patience import until
from tests.support.pulled_peers import weights
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


@asynccontextmanager
async def joining(step: str) -> AsyncIterator[tuple[RoutedFleet, Daemon, Gate]]:
    """A fleet with version 1 and an adapter, and a replica that joins: its engine is held up at this step of what it is
    brought."""
    async with adapting() as first, adapting() as late, over([first]) as fleet:
        await fleet.until_ready(1)
        await push(fleet.running.address, 1)
        await fleet.client.push_lora("poet", TENSORS, CONFIG)
        gate = late.engine.gates[step] = Gate()
        fleet.running.router.add(late.address)
        try:
            await until_reached(gate)
            fleet.daemons.append(late)
            yield fleet, late, gate
        finally:
            gate.open.set()


async def test_a_version_is_pushed_while_an_adapter_is_brought() -> None:
    """It reaches the replica meanwhile, which gets requests already: its weights are exchanged as soon as the adapter
    is loaded."""
    async with joining("load_lora") as (fleet, late, gate):
        assert fleet.state(late) is ReplicaState.READY
        prepared = late.engine.gates["prepare_weights"] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(2), version=2, timeout_s=30))
        await until_reached(prepared)
        prepared.open.set()
        gate.open.set()
        await pushing
        assert all(hold(2, daemon) for daemon in fleet.daemons)
        await until(lambda: "poet" in late.engine.loras.files)


async def test_an_adapter_is_pushed_while_another_one_is_brought() -> None:
    """Both are loaded, one after the other."""
    async with joining("load_lora") as (fleet, late, gate):
        pushing = asyncio.create_task(fleet.client.push_lora("cook", TENSORS, CONFIG, push_id="p", timeout_s=30))
        await until(lambda: "p" in late.registry.live and late.registry.live["p"].lifecycle.is_busy)
        gate.open.set()
        await pushing
        assert all("cook" in daemon.engine.loras.files for daemon in fleet.daemons)
        await until(lambda: "poet" in late.engine.loras.files)


async def test_a_version_is_committed_while_an_adapter_is_brought() -> None:
    """All replicas have prepared it. Somebody has unloaded the adapter on one of them alone."""
    async with joining("load_lora") as (fleet, late, gate):
        gate.open.set()
        await until(lambda: "poet" in late.engine.loras.files)
        await fleet.client.push_weights(weights(2), version=2, action="prepare", push_id="p", timeout_s=30)
        again = late.engine.gates["load_lora"] = Gate()
        async with AsyncClient(late.address) as alone:
            await alone.unload_lora("poet")
        await until_reached(again)
        committing = asyncio.create_task(fleet.client.commit_push("p"))
        await until(lambda: late.registry.live["p"].lifecycle.is_busy)
        again.open.set()
        await committing
        assert all(hold(2, daemon) for daemon in fleet.daemons)


async def test_a_replica_that_is_brought_a_version_is_not_ready_before_it_has_answered() -> None:
    """It serves the version, and would refuse the next push: no push waits for it, and it is brought that one too."""
    async with joining("resume") as (fleet, late, gate):
        member = fleet.running.router.find(late.address).member
        await until(lambda: member.version is not None and member.version.number == 1)
        assert fleet.state(late) is ReplicaState.SYNCING
        await fleet.client.push_weights(weights(2), version=2, timeout_s=30)
        assert not hold(2, late)
        gate.open.set()
        await until(lambda: hold(2, late))
        await fleet.until_ready(2)


async def test_an_adapter_is_pushed_while_a_version_is_brought() -> None:
    """Also to the replica that gets no requests yet."""
    async with joining("prepare_weights") as (fleet, _, gate):
        await fleet.client.push_lora("cook", TENSORS, CONFIG, timeout_s=30)
        assert all("cook" in daemon.engine.loras.files for daemon in fleet.daemons)
        gate.open.set()
        await fleet.until_ready(2)
