"""grpc.health.v1 follows the state board."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.control.conditions import EngineCondition, Phase
from genserve.rpc.server import SERVICE_NAMES
from tests.support.patience import STEP_S, turns
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import Daemon

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVES = {Phase.RUNNING: SERVING, Phase.PAUSED: SERVING, Phase.APPLYING: SERVING}


async def check(daemon: Daemon, service: str = "") -> int:
    """The status of a service."""
    stub = health_pb2_grpc.HealthStub(daemon.channel)
    response: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


@pytest.mark.parametrize("phase", Phase)
async def test_check_tells_whether_the_phase_serves(daemon: Daemon, phase: Phase) -> None:
    """For the server as a whole and for each service."""
    enter_phase(daemon.board, phase)
    for service in ("", *SERVICE_NAMES):
        assert await check(daemon, service) == SERVES.get(phase, NOT_SERVING)


async def test_the_three_services_are_known_by_name_and_others_are_not(daemon: Daemon) -> None:
    """NOT_FOUND, as the protocol has it."""
    names = ["GenerationService", "WeightService", "ControlService"]
    assert list(SERVICE_NAMES) == [f"genserve.v1.{name}" for name in names]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(daemon, "genserve.v1.Nope")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_every_change_and_ends_with_the_engine(daemon: Daemon) -> None:
    """A phase that serves as well is no change."""
    watch = health_pb2_grpc.HealthStub(daemon.channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    seen = [(await watch.read()).status]
    enter_phase(daemon.board, Phase.APPLYING)
    await turns()  # the watcher has looked
    for condition in (EngineCondition.TAINTED, None, EngineCondition.DEAD):
        daemon.board.enter(condition)
        seen.append((await asyncio.wait_for(watch.read(), STEP_S)).status)
    assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert await watch.read() is grpc.aio.EOF


async def test_watching_an_unknown_service_says_so(daemon: Daemon) -> None:
    """SERVICE_UNKNOWN, not an error: it may come."""
    watch = health_pb2_grpc.HealthStub(daemon.channel).Watch(health_pb2.HealthCheckRequest(service="x"), timeout=30)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_an_engine_that_does_not_answer_is_not_serving_until_it_does(daemon: Daemon) -> None:
    """The phase stays: only the heartbeat is missing."""
    watch = health_pb2_grpc.HealthStub(daemon.channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    seen = [(await watch.read()).status]
    for answers in (False, True):
        daemon.board.tell_answers(answers)
        seen.append((await asyncio.wait_for(watch.read(), STEP_S)).status)
    assert seen == [SERVING, NOT_SERVING, SERVING]
    assert daemon.board.phase is Phase.RUNNING
