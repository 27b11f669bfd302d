"""Who waits for a fleet learns who keeps it waiting, and why; and nobody is told that it serves when it does not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from genserve.cli import main
from genserve.cli.status import why_waiting
from genserve.client import AsyncClient
from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.errors import DeadlineError, NoReplicaError
from genserve.fleet.config import RouteConfig
from genserve.fleet.serve import RunningRouter, start_router
from genserve.process.signals import Stopped
from genserve.rpc.server import DaemonServer
from genserve.settings.config import ServeConfig
from genserve.v1.generation_pb2 import GenerateRequest
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fleet.routers import QUICK, over, replica, routed
from tests.support.lateness import explained_errors
from tests.support.patience import SCALE, STEP_S, until
from tests.support.pulled_peers import weights
from tests.support.refusals import refuses
from tests.support.scripted_daemon import reason_of

TIMEOUT_S = 3.0 * SCALE
IMPATIENT = replace(QUICK, wait_ready_s=0.2)
"""A request that no replica takes fails long before its own deadline."""
Command = Callable[..., Awaitable[str]]


@pytest.fixture
def genserve(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command against a router; gives its stdout."""

    async def run(target: str, *arguments: str) -> str:
        assert await asyncio.to_thread(main, [*arguments, "--target", target]) == 0
        return capsys.readouterr().out

    return run


async def test_error_of_a_request_to_a_paused_fleet_names_the_holder() -> None:
    """Through the router: the lease is the fleet's, and no replica's."""
    async with routed(2) as fleet:
        lease = (await fleet.client.pause(holder="alice@host", ttl_s=600)).lease

        async def calls(timeout_s: float) -> Sequence[Awaitable[object]]:
            one, many = fleet.client.generate, fleet.client.generate_many
            return [one("a", timeout_s=timeout_s), many(["b"], timeout_s=timeout_s)]

        for error in await explained_errors(calls, TIMEOUT_S):
            assert isinstance(error, DeadlineError), error
            assert "paused by alice@host" in error.message
            assert (error.metadata["holder"], error.metadata["lease_id"]) == ("alice@host", lease.lease_id)
        status = await fleet.client.status()
        assert why_waiting(status).startswith("paused by alice@host, ")
        for phase in ("dead", "tainted"):  # which the end of the pause would not change
            assert why_waiting(replace(status, state=replace(status.state, phase=phase))) == f"it is {phase}"


@pytest.fixture
async def starting() -> AsyncIterator[tuple[RunningRouter, str]]:
    """A router whose one replica loads weights, and the replica's address."""
    board = StateBoard(None, tuple, "late", DaemonCondition.STARTING)
    board.tell_step("loading weights", 0.0)
    async with AsyncExitStack() as stack:
        opened = await DaemonServer.open(ServeConfig(port=0), board)
        stack.push_async_callback(opened.stop, 0)
        running = await start_router(RouteConfig([opened.address], port=0, fleet=IMPATIENT), stack, Stopped())
        await until(lambda: "loading weights" in running.router.fleet.why_none())
        yield running, opened.address


async def test_a_fleet_whose_replicas_start_lists_them_with_their_steps(
    starting: tuple[RunningRouter, str], genserve: Command
) -> None:
    """In the list and in the status of the router, each with how long it has taken."""
    running, address = starting
    assert f"{address}  connecting" in (listed := await genserve(running.address, "replicas", "list"))
    assert "loading weights, for " in listed
    phase, doing, row = (await genserve(running.address, "status")).splitlines()
    assert phase == "phase    starting"
    assert doing.startswith("doing    none of 1 replicas can be used yet (") and address in doing
    assert row.startswith(f"replica  {address}  connecting  its engine is starting: loading weights, for ")


async def test_a_request_that_no_replica_takes_in_time_learns_what_each_does(
    starting: tuple[RunningRouter, str],
) -> None:
    """By its address. gRPC is told not to try again: the router has waited, and the caller's time would end without
    the reason."""
    running, address = starting
    async with AsyncClient(running.address) as client:
        with refuses(NoReplicaError, says=f"{address}: its engine is starting: loading weights"):
            await client.generate("x", timeout_s=STEP_S)
    async with grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).Generate(GenerateRequest(text="x"), timeout=STEP_S).read()
    assert reason_of(caught.value) == NoReplicaError.reason
    assert ("grpc-retry-pushback-ms", "-1") in tuple(caught.value.trailing_metadata())


async def test_a_version_that_nobody_serves_is_not_told_as_served(genserve: Command) -> None:
    """The last holder has gone, the other replica cannot fetch it: the fleet does not run."""
    async with routed(1, IMPATIENT) as fleet, replica() as other:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        await fleet.client.remove_replica(fleet.daemons[0].address, force=True)
        await fleet.client.add_replica(other.address)
        router = fleet.running.router
        await until(lambda: "no replica has version 1" in router.fleet.where(router.find(other.address).member)[1])
        status = await fleet.client.status()
        assert status.state.phase == "starting"
        assert status.state.startup is not None
        assert "no replica has version 1 to fetch it from" in status.state.startup.step
        assert "no replica has version 1" in why_waiting(status)
        for command in ("status",), ("replicas", "list"):
            assert "1, which no replica serves" in await genserve(fleet.running.address, *command)
        with refuses(NoReplicaError, says="no replica has version 1 to fetch it from"):
            await fleet.client.generate("x", timeout_s=STEP_S)


async def test_a_fleet_that_serves_again_says_so() -> None:
    """A replica that drains alone is not the router's own shutdown."""
    async with routed(1) as fleet:
        (daemon,) = fleet.daemons
        daemon.board.become(DaemonCondition.DRAINING)
        await until(lambda: not fleet.running.router.fleet.ready)
        assert (await fleet.client.status()).state.phase == "starting"
        async with replica() as other:
            await fleet.client.add_replica(other.address)
            await fleet.until_ready(1)
            status = await fleet.client.status()
            assert (status.state.phase, status.state.startup) == ("running", None)
            assert why_waiting(replace(status, state=replace(status.state, waiting_requests=0))) == ""


async def test_an_empty_fleet_says_that_it_is_empty(genserve: Command) -> None:
    """And not that it runs."""
    async with over([]) as fleet:
        assert "the fleet is empty" in await genserve(fleet.running.address, "status")
