"""A daemon that has no engine yet: it says how far it is, refuses the rest, and serves without a new connection."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from genserve.cli.status import status_table
from genserve.client import AsyncClient
from genserve.control.conditions import DaemonCondition, EngineCondition
from genserve.control.state import StateBoard
from genserve.errors import DeadlineError, DrainingError, EngineDeadError
from genserve.rpc.server import SERVICE_NAMES, SERVICES, DaemonServer
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, types_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.weights.push.types import PushHeader
from tests.support.answers import answer_of
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import CHECKPOINT, serving

CONFIG = ServeConfig(port=0)
BEGAN_S = 1_700_000_000.0


@dataclass
class Starting:
    """What there is without an engine."""

    board: StateBoard
    server: DaemonServer


@pytest.fixture
async def starting() -> AsyncIterator[Starting]:
    """A daemon that loads weights."""
    board = StateBoard(None, tuple, "the first", DaemonCondition.STARTING)
    board.tell_step("starting the workers", BEGAN_S)
    board.tell_step("loading weights", BEGAN_S + 5)
    server = await DaemonServer.open(CONFIG, board)
    try:
        yield Starting(board, server)
    finally:
        await server.stop(0)


async def test_every_method_but_the_status_is_refused(starting: Starting) -> None:
    """In all services: UNAVAILABLE, with what the daemon does."""
    answered = set()
    async with grpc.aio.insecure_channel(starting.server.address) as channel:
        for service in SERVICES:
            for method in service.methods:
                call = channel.stream_stream(f"/{service.full_name}/{method.name}")(iter([b""]), timeout=30)
                try:
                    await answer_of(call, call.read())
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, method.full_name
                    assert "loading weights" in error.details()
                else:
                    answered.add(method.name)
                call.cancel()
    assert answered == {"GetStatus", "WatchStatus"}


async def test_the_client_and_the_command_line_show_what_a_start_does(starting: Starting) -> None:
    """And for how long, with nothing that only an engine knows."""
    async with AsyncClient(starting.server.address) as client:
        status = await client.status()
        for timeout_s in (1.5, 5.0, 25.0):  # on a busy machine the daemon may not answer within the time
            with pytest.raises(DeadlineError) as late:
                await client.wait_ready(timeout_s)
            if "loading" in late.value.message:
                break
        assert re.search(r"loading weights, for \d+ s", late.value.message)
        with pytest.raises(DrainingError) as caught:
            await client.server_info()
    assert (caught.value.metadata, caught.value.retry_after_s) == ({"phase": "STARTING"}, 1.0)
    assert re.search(r"loading weights, for \d+ s \(\d+ s since the start\)", caught.value.message)
    assert "wait_ready" in caught.value.message, "what helps"
    assert status.state.instance_id == "the first"
    then = replace(status, time=datetime.fromtimestamp(BEGAN_S + 12, UTC))
    assert status_table(then, None, datetime.now(UTC)).splitlines() == [
        "phase    starting",
        "doing    loading weights, for 7 s (12 s since the start)",
    ]


async def test_reflection_tells_all_services_from_the_beginning(starting: Starting) -> None:
    """A tool that looks early finds what there will be."""
    async with grpc.aio.insecure_channel(starting.server.address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        listed = {each.name for each in (await call.read()).list_services_response.service}
    assert listed >= {*SERVICE_NAMES, "grpc.health.v1.Health"}


async def test_watches_go_on_when_the_daemon_serves(starting: Starting) -> None:
    """Health changes once, and methods that were refused are served, over the same connection."""
    board = starting.board
    async with (
        grpc.aio.insecure_channel(starting.server.address) as channel,
        AsyncClient(starting.server.address) as client,
    ):
        health = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        watch = ControlServiceStub(channel).WatchStatus(control_pb2.WatchStatusRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        first = await watch.read()
        assert (first.state.phase, first.state.startup.step) == (types_pb2.PHASE_STARTING, "loading weights")
        with pytest.raises(DrainingError):
            await client.server_info()
        waiting = asyncio.create_task(client.wait_ready(30))
        async with serving(CONFIG, opened=starting.server, board=board) as daemon:
            assert not waiting.done()
            with pytest.raises(DrainingError, match=r"^the engine is starting; wait until it serves"):
                await client.generate([1])
            board.become(DaemonCondition.SERVING)
            await waiting
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await client.server_info()).model == daemon.engine.info.model
            last: Any = first
            while last.state.phase == types_pb2.PHASE_STARTING:
                last = await watch.read()
            assert not last.state.HasField("startup")
            board.tell_answers(False)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_watch_that_began_early_shows_pushes(starting: Starting) -> None:
    """As one does that begins when the daemon serves."""
    async with (
        AsyncClient(starting.server.address) as client,
        client.watch_status() as watch,
    ):
        assert (await anext(watch)).state.phase == "starting"
        async with serving(CONFIG, opened=starting.server, board=starting.board) as daemon:
            starting.board.become(DaemonCondition.SERVING)
            stream = await daemon.registry.open(PushHeader("step-1", 1, manifest=CHECKPOINT.as_manifest()))
            async with asyncio.timeout(STEP_S):
                while not (last := await anext(watch)).pushes:
                    pass
            stream.detach()
    assert [push.push_id for push in last.pushes] == ["step-1"]


async def test_a_start_that_fails_ends_its_watches(starting: Starting) -> None:
    """With the state DEAD; calls are refused with that."""
    async with AsyncClient(starting.server.address) as client:
        watch = client.watch_status()
        assert (await anext(watch)).state.phase == "starting"
        starting.board.enter(EngineCondition.DEAD)
        assert [each.state.phase async for each in watch] == ["dead"]
        with pytest.raises(EngineDeadError):
            await client.server_info()


async def test_a_step_that_goes_on_began_when_it_first_did(starting: Starting) -> None:
    """Ranks begin it one after the other."""
    starting.board.tell_step("loading weights", BEGAN_S + 9)
    startup = starting.board.startup
    assert startup is not None
    assert (startup.begin_s, startup.step_begin_s) == (BEGAN_S, BEGAN_S + 5)
