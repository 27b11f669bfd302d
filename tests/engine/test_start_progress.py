"""What a daemon answers while its engine starts."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from genserve.engine.vllm.start.progress import LINES, STEPS
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from tests.support.answers import answer_of
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.scripted_daemon import detail_of, reason_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def starting(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose engine does not run yet."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--uds", str(tmp_path / "sock")]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        process.address = process.wait_listening()
        yield process
    finally:
        process.kill()


async def read_all(call: Any, until: Any) -> list[Any]:
    """The messages of a stream, to the first that is as wanted."""
    messages = []
    async for message in call:
        messages.append(message)
        if until(message):
            call.cancel()
            break
    return messages


async def refused(call: Any) -> None:
    """It is UNAVAILABLE, says why, and when to call again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "DRAINING"
    info: Any = detail_of(caught.value, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"phase": "STARTING"}
    retry: Any = detail_of(caught.value, error_details_pb2.RetryInfo)
    assert retry.retry_delay.seconds == 1


async def refusals(channel: grpc.aio.Channel) -> None:
    """One call of each kind: one request or many, one answer or many."""
    control, generation, weights = (
        stub(channel) for stub in (ControlServiceStub, GenerationServiceStub, WeightServiceStub)
    )
    generate = generation_pb2.GenerateRequest(text="a")

    async def frames() -> Any:
        yield weights_pb2.PushWeightsRequest()

    async def requests() -> Any:
        yield generation_pb2.GenerateManyRequest(generate=generate)

    await refused(control.GetServerInfo(control_pb2.GetServerInfoRequest()))
    await refused(generation.Generate(generate).read())
    await refused(answer_of(weights.PushWeights(frames())))
    many = generation.GenerateMany(requests())
    await refused(answer_of(many, many.read()))


async def stopped_core(daemon: DaemonProcess) -> psutil.Process:
    """The process of the engine, which has hardly begun, and waits."""
    async with asyncio.timeout(60):
        while True:
            for each in psutil.Process(daemon.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "multiprocessing.spawn" in " ".join(each.cmdline()):
                        each.suspend()
                        return each
            await asyncio.sleep(0.005)


async def test_a_start_can_be_watched_from_its_beginning_to_its_end(starting: DaemonProcess) -> None:
    """Watches that begin before there is an engine go on: health changes once, and each step comes after the one
    before it. All other calls are refused meanwhile."""
    core = await stopped_core(starting)
    async with grpc.aio.insecure_channel(starting.address) as channel:
        control, health = ControlServiceStub(channel), HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="genserve.v1.GenerationService")
        serves = asyncio.create_task(read_all(health.Watch(check), lambda each: each.status == SERVING))
        status: Message = await control.GetStatus(control_pb2.GetStatusRequest())
        assert isinstance(status, control_pb2.GetStatusResponse)
        assert status.state.phase == types_pb2.PHASE_STARTING
        assert (await health.Check(check)).status == NOT_SERVING
        await refusals(channel)
        watch = control.WatchStatus(control_pb2.WatchStatusRequest())

        def is_over(each: control_pb2.WatchStatusResponse) -> bool:
            core.resume()  # at the first one
            return each.state.phase != types_pb2.PHASE_STARTING

        seen = await read_all(watch, is_over)
        assert [each.status for each in await serves] == [NOT_SERVING, SERVING]
        status = await control.GetStatus(control_pb2.GetStatusRequest())
    started = seen.pop()
    assert started.state.phase == types_pb2.PHASE_RUNNING
    assert not started.state.HasField("startup")
    assert {each.state.instance_id for each in seen} == {started.state.instance_id}
    told = [each.state.startup for each in seen if each.state.HasField("startup")]
    steps = list(dict.fromkeys(each.step for each in told))
    assert steps == sorted(steps, key=STEPS.index)
    # The first ones may be over before the watch begins; compiling and measuring are for GPUs.
    assert {"loading weights", "capturing graphs and warming up", "preparing the workers for pushes"} <= set(steps)
    assert len({each.begin_time.ToNanoseconds() for each in told}) == 1
    times = [each.step_begin_time.ToNanoseconds() for each in told]
    assert times == sorted(times)
    starting.wait_serving()
    assert starting.stop() == 0


def test_vllm_has_the_lines_that_tell_the_steps() -> None:
    """Each is the beginning of a string in its sources. Without one, watchers would not see that step."""
    import vllm  # which is not imported where tests are only collected

    root = Path(vllm.__file__).parent
    places = ("v1/worker", "v1/engine", "v1/core", "compilation")
    sources = "".join(path.read_text() for place in places for path in (root / place).rglob("*.py"))
    assert [line for line in LINES if f'"{line}' not in sources] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_start_at_once(starting: DaemonProcess, number: signal.Signals) -> None:
    """With all that it has started. The status says which signal it was."""
    started = psutil.Process(starting.process.pid).children(recursive=True)
    starting.process.send_signal(number)
    assert await asyncio.to_thread(starting.exit_status, 60) == 128 + number
    assert starting.stderr.splitlines()[-1] == f"genserve: {number.name} while starting, exiting now"
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


async def test_watcher_of_a_start_gets_its_failure(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The last state is DEAD, then the watch ends."""
    flags = ["--model", str(checkpoints["a"]), "--kv-cache-memory-bytes", "1000"]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        async with grpc.aio.insecure_channel(process.wait_listening()) as channel:
            watch = ControlServiceStub(channel).WatchStatus(control_pb2.WatchStatusRequest())
            phases = [each.state.phase for each in await read_all(watch, lambda _: False)]
        assert (phases[0], phases[-1]) == (types_pb2.PHASE_STARTING, types_pb2.PHASE_DEAD)
        assert await asyncio.to_thread(process.exit_status, 60) == 1
        assert "No available memory" in process.stderr.splitlines()[-1]
    finally:
        process.kill()
