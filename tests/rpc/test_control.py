"""ControlService, as a client on the wire sees it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

import genserve
from genserve.control.conditions import Phase
from genserve.control.sleep import SleepController
from genserve.rpc.control import ControlServicer
from genserve.rpc.convert.control import ServerFacts
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from genserve.weights.lora.loader import LoraLoader
from tests.rpc.conftest import busier
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, MAX_STAGING_BYTES, Daemon, field_of, reason_of
from tests.support.scripted_engine import Gate


async def test_a_pause_is_a_lease_until_it_is_given_back(daemon: Daemon) -> None:
    """Pause, renew, resume; every answer has the state."""
    granted = await daemon.control.Pause(control_pb2.PauseRequest(holder="me"))
    assert granted.lease.holder == "me"
    assert granted.lease.expire_time.ToSeconds() == pytest.approx(time.time() + 60, abs=5)
    assert (granted.state.phase, granted.requests_kept) == (types_pb2.PHASE_PAUSED, 5)
    assert not daemon.engine.running
    renewed = await daemon.control.RenewPause(
        control_pb2.RenewPauseRequest(lease_id=granted.lease.lease_id, ttl=Duration(seconds=600))
    )
    assert renewed.lease.expire_time.ToSeconds() == pytest.approx(time.time() + 600, abs=5)
    assert [lease.lease_id for lease in renewed.state.pauses] == [granted.lease.lease_id]
    resumed = await daemon.control.Resume(control_pb2.ResumeRequest(lease_id=granted.lease.lease_id))
    assert (resumed.lease_expired, resumed.state.phase) == (False, types_pb2.PHASE_RUNNING)
    assert daemon.engine.running


async def test_everything_in_a_pause_arrives(daemon: Daemon) -> None:
    """Field by field. A bare one has the contract's defaults: KEEP, the cache stays, and it takes at most a minute."""
    request = control_pb2.PauseRequest(
        mode=types_pb2.PAUSE_MODE_WAIT,
        kv_policy=types_pb2.KV_POLICY_RECOMPUTE,
        holder="me",
        ttl=Duration(seconds=5),
        request_id="r",
        fleet_lease_id="f",
        timeout=Duration(seconds=20),
    )
    lease = (await daemon.control.Pause(request)).lease
    assert (lease.holder, lease.mode, lease.fleet_lease_id) == ("me", types_pb2.PAUSE_MODE_WAIT, "f")
    assert lease.expire_time.ToSeconds() == pytest.approx(time.time() + 5, abs=3)
    assert daemon.engine.calls == ["pause wait recompute"]
    assert 10 < daemon.engine.timeouts_s["pause"] <= 20
    assert (await daemon.control.Pause(request)).lease == lease
    await daemon.control.Resume(control_pb2.ResumeRequest(force=True))
    await daemon.control.Pause(control_pb2.PauseRequest())
    assert daemon.engine.calls[2:] == ["pause keep reuse"]
    assert 50 < daemon.engine.timeouts_s["pause"] <= 60


async def test_each_answer_of_the_control_plane_carries_the_state(daemon: Daemon) -> None:
    """Also one that has nothing else to say."""
    control, weights = daemon.control, daemon.weights
    lease_id = (await control.Pause(control_pb2.PauseRequest())).lease.lease_id
    for call, request in (
        (control.GetStatus, control_pb2.GetStatusRequest()),
        (control.GetServerInfo, control_pb2.GetServerInfoRequest()),
        (control.RenewPause, control_pb2.RenewPauseRequest(lease_id=lease_id)),
        (control.Sleep, control_pb2.SleepRequest(level=0)),
        (control.WakeUp, control_pb2.WakeUpRequest()),
        (control.Resume, control_pb2.ResumeRequest(lease_id=lease_id)),
        (control.ResetCache, control_pb2.ResetCacheRequest()),
        (control.ListLoras, control_pb2.ListLorasRequest()),
        (weights.GetWeights, weights_pb2.GetWeightsRequest()),
        (control.Drain, control_pb2.DrainRequest()),
    ):
        answer: Any = await call(request)
        assert answer.state.instance_id == "test", type(answer).__name__


async def test_a_holder_is_told_that_its_lease_was_ended_by_somebody_else(daemon: Daemon) -> None:
    """The engine has run meanwhile."""
    granted = await daemon.control.Pause(control_pb2.PauseRequest())
    forced = await daemon.control.Resume(control_pb2.ResumeRequest(force=True))
    assert (forced.lease_expired, forced.state.phase) == (False, types_pb2.PHASE_RUNNING)
    assert (await daemon.control.Resume(control_pb2.ResumeRequest(lease_id=granted.lease.lease_id))).lease_expired


async def test_a_lost_lease_has_its_reason(daemon: Daemon) -> None:
    """FAILED_PRECONDITION."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.RenewPause(control_pb2.RenewPauseRequest(lease_id="nope"))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "PAUSE_LEASE_LOST")


async def test_a_pause_that_takes_too_long_changes_nothing(daemon: Daemon) -> None:
    """DEADLINE_EXCEEDED from the daemon, well before the client's own deadline."""
    daemon.engine.hangs.add("pause")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.Pause(control_pb2.PauseRequest(timeout=Duration(nanos=200_000_000)), timeout=30)
    assert reason_of(caught.value) == "DEADLINE_EXCEEDED"
    assert (await daemon.control.GetStatus(control_pb2.GetStatusRequest())).state.phase == types_pb2.PHASE_RUNNING


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"ttl": Duration()}, "ttl"),
        ({"timeout": Duration(seconds=-1)}, "timeout"),
        ({"mode": 99}, "mode"),
        ({"kv_policy": 9}, "kv_policy"),
    ],
)
async def test_a_bad_field_of_a_pause_is_named(daemon: Daemon, fields: dict[str, Any], path: str) -> None:
    """INVALID_ARGUMENT with the field. A ttl of zero is no default."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.Pause(control_pb2.PauseRequest(**fields))
    assert field_of(caught.value) == path


async def test_watching_begins_at_once_and_follows_every_change(daemon: Daemon) -> None:
    """A pause and a resume are told long before the interval is over, in order."""
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(interval=Duration(seconds=60)), timeout=30)
    phases = [(await watch.read()).state.phase]
    granted = await daemon.control.Pause(control_pb2.PauseRequest())
    phases.append((await asyncio.wait_for(watch.read(), STEP_S)).state.phase)
    await daemon.control.Resume(control_pb2.ResumeRequest(lease_id=granted.lease.lease_id))
    while phases[-1] != types_pb2.PHASE_RUNNING:
        phases.append((await asyncio.wait_for(watch.read(), STEP_S)).state.phase)
    assert phases[:2] == [types_pb2.PHASE_RUNNING, types_pb2.PHASE_PAUSED]


async def test_watching_tells_of_the_load_at_the_interval_while_it_differs(daemon: Daemon) -> None:
    """Nobody announces a change of the load; and while nothing changes nothing is sent."""
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(interval=Duration(nanos=100_000_000)), timeout=30)
    assert (await watch.read()).load.running == 3
    daemon.engine.current_load = busier(daemon.engine.current_load, 4)
    second = await asyncio.wait_for(watch.read(), STEP_S)
    assert (second.load.running, second.state.running_requests) == (4, 4)
    third = asyncio.create_task(watch.read())
    with advanced_clock() as clock:
        for _ in range(5):
            await clock.advance(0.1)
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # comes after what was told
        assert not third.done()
    third.cancel()


class NothingDropped:
    """No sleep has dropped the weights, and nobody pushes."""

    def between_pushes(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def restore_dropped(self) -> None:
        raise AssertionError


class SlowReader:
    """A call whose first message takes so long to write that something happens meanwhile."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.messages: list[control_pb2.WatchStatusResponse] = []
        self.second = asyncio.Event()

    async def write(self, message: control_pb2.WatchStatusResponse) -> None:
        self.messages.append(message)
        if len(self.messages) == 1:
            self.meanwhile()
            await asyncio.sleep(0)
        else:
            self.second.set()


async def test_what_changes_while_a_status_is_written_is_told_next(daemon: Daemon) -> None:
    """Nobody announces it a second time: a watcher that only waited would tell it a whole interval late."""
    reader = SlowReader(lambda: enter_phase(daemon.board, Phase.APPLYING))
    facts = ServerFacts("m", 1, 1, 1, [])
    loras = LoraLoader(daemon.engine, daemon.board, daemon.pauses, None)
    sleeps = SleepController(daemon.engine, daemon.pauses, daemon.board, NothingDropped())
    parts = (daemon.engine, daemon.pauses, sleeps, daemon.board, loras, daemon.registry)
    servicer = ControlServicer(*parts, lambda: facts, daemon.stopped.stop)
    request = control_pb2.WatchStatusRequest(interval=Duration(seconds=60))
    watching = asyncio.create_task(servicer.WatchStatus(request, reader))  # type: ignore[arg-type]
    try:
        await until(reader.second.is_set)
    finally:
        watching.cancel()
    assert [each.state.phase for each in reader.messages] == [types_pb2.PHASE_RUNNING, types_pb2.PHASE_APPLYING]


async def test_watching_ends_when_the_engine_has_died(daemon: Daemon) -> None:
    """The last status says so, and the stream ends well: nothing is left open at a shutdown."""
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(), timeout=30)
    await watch.read()
    enter_phase(daemon.board, Phase.DEAD)
    assert (await watch.read()).state.phase == types_pb2.PHASE_DEAD
    assert await watch.read() is grpc.aio.EOF


async def test_the_server_tells_what_it_is(daemon: Daemon) -> None:
    """Limits are those that requests run into."""
    info = await daemon.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert (info.model, info.architecture, info.device) == ("scripted", "Scripted", "cpu")
    assert info.limits.max_message_bytes == MAX_MESSAGE_BYTES
    assert info.limits.max_staging_bytes == MAX_STAGING_BYTES
    assert info.limits.max_streams == ServeConfig().max_streams and not info.protection.tls
    assert (info.limits.max_active_requests, info.limits.max_n) == (8192, 256)
    assert info.limits.write_timeout.seconds == 300
    versions = {each.component: each.version for each in info.versions}
    assert versions.keys() >= {"genserve", "grpc", "python"}
    assert (versions["genserve"], versions["grpc"]) == (genserve.__version__, grpc.__version__)
    assert "push" in info.features


async def test_the_cache_is_reset_as_asked(daemon: Daemon) -> None:
    """With and without preempting what runs."""
    assert (await daemon.control.ResetCache(control_pb2.ResetCacheRequest())).reset
    await daemon.control.ResetCache(control_pb2.ResetCacheRequest(reset_running_requests=True))
    assert daemon.engine.calls == ["reset_prefix_cache False", "reset_prefix_cache True"]


async def test_watching_ends_when_the_daemon_has_drained(daemon: Daemon) -> None:
    """Nothing keeps the server open then: neither a watcher of the status nor one of health."""
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(), timeout=30)
    health = health_pb2_grpc.HealthStub(daemon.channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    await watch.read()
    await health.read()
    enter_phase(daemon.board, Phase.DRAINING)
    assert (await watch.read()).state.phase == types_pb2.PHASE_DRAINING
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    daemon.board.end()
    assert await watch.read() is grpc.aio.EOF
    assert await health.read() is grpc.aio.EOF


async def test_a_call_with_too_much_metadata_is_refused_and_the_others_go_on(daemon: Daemon) -> None:
    """RESOURCE_EXHAUSTED on the same connection that serves."""
    request = control_pb2.GetStatusRequest()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.GetStatus(request, metadata=(("x-large", "a" * (20 << 10)),), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await daemon.control.GetStatus(request, timeout=30)).state.phase == types_pb2.PHASE_RUNNING


@pytest.mark.parametrize("field", ["holder", "request_id"])
async def test_a_pause_cannot_break_every_client(daemon: Daemon, field: str) -> None:
    """What a lease says rides in every answer: five megabytes of it would be above every client's limit, for ever."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.Pause(control_pb2.PauseRequest(**{field: "x" * 1000}), timeout=30)
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert daemon.engine.calls == []
    assert (await daemon.control.GetStatus(control_pb2.GetStatusRequest(), timeout=30)).state.pauses == []


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (types_pb2.PAUSE_MODE_UNSPECIFIED, "keep"),
        (types_pb2.PAUSE_MODE_WAIT, "wait"),
        (types_pb2.PAUSE_MODE_ABORT, "abort"),
    ],
)
async def test_a_sleep_has_the_mode_that_was_asked_for(daemon: Daemon, mode: types_pb2.PauseMode, says: str) -> None:
    """Requests are kept unless something else is said."""
    response = await daemon.control.Sleep(control_pb2.SleepRequest(mode=mode), timeout=30)
    assert response.state.phase == types_pb2.PHASE_SLEEPING
    assert daemon.engine.calls == [f"pause {says} reuse", "sleep 1 scheduling+weights+kv_cache"]


async def test_abandoned_digests_block_pauses_until_the_engine_ends_them(daemon: Daemon) -> None:
    """EngineCore reads on: a pause behind it would time out, its undoing too, and the daemon would exit."""
    digests = daemon.engine.gates["weight_digests"] = Gate()
    asking = daemon.weights.GetWeights(weights_pb2.GetWeightsRequest(include_digests=True), timeout=60)
    await digests.reached.wait()
    daemon.engine.free.clear()  # as the engine sees it
    asking.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.Pause(control_pb2.PauseRequest(timeout=Duration(nanos=100_000_000)), timeout=30)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert daemon.engine.calls == ["weight_digests"]
    daemon.engine.free.set()
    await daemon.control.Pause(control_pb2.PauseRequest(), timeout=30)


async def test_sleep_and_wake_up_part_by_part_as_clients_see_it(daemon: Daemon) -> None:
    """Level and tags arrive, and every answer tells what is asleep."""
    sleep = control_pb2.SleepRequest(level=2, mode=types_pb2.PAUSE_MODE_WAIT)
    state = (await daemon.control.Sleep(sleep, timeout=30)).state
    assert list(state.asleep_tags) == ["scheduling", "weights", "kv_cache"]
    assert state.weights_discarded
    assert daemon.engine.calls == ["pause wait reuse", "sleep 2 scheduling+weights+kv_cache"]
    state = (await daemon.control.WakeUp(control_pb2.WakeUpRequest(tags=["weights"]), timeout=30)).state
    assert (state.phase, list(state.asleep_tags)) == (types_pb2.PHASE_SLEEPING, ["scheduling", "kv_cache"])
    assert (await daemon.control.GetStatus(control_pb2.GetStatusRequest(), timeout=30)).state == state


async def test_dropped_weights_that_nobody_has_are_told_as_tainted(daemon: Daemon) -> None:
    """This daemon has no bytes of version 0: a push is what it needs, and it says so."""
    await daemon.control.Sleep(control_pb2.SleepRequest(level=2), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.control.WakeUp(control_pb2.WakeUpRequest(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "ENGINE_TAINTED"
    assert "push a complete version" in str(caught.value.details())
    assert not daemon.engine.running


async def test_digests_of_weights_that_sleep_or_were_dropped_are_refused(daemon: Daemon) -> None:
    """On a GPU there is no memory to read; afterwards there is, and nothing in it."""
    request = weights_pb2.GetWeightsRequest(include_digests=True)
    reasons = []
    await daemon.control.Sleep(control_pb2.SleepRequest(level=2), timeout=30)
    for tags in (["weights"], []):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await daemon.weights.GetWeights(request, timeout=30)
        reasons.append(reason_of(caught.value))
        if tags:
            await daemon.control.WakeUp(control_pb2.WakeUpRequest(tags=tags), timeout=30)
    assert reasons == ["ENGINE_SLEEPING", "ENGINE_TAINTED"]
    assert "weight_digests" not in daemon.engine.calls


@pytest.mark.parametrize(
    ("call", "fields", "field"),
    [
        ("Sleep", {"level": 3}, "level"),
        ("Sleep", {"tags": ["weights"]}, "tags"),
        ("Sleep", {"tags": ["kv_cache", "kv"]}, "tags[1]"),
        ("WakeUp", {"tags": ["weight"]}, "tags[0]"),
    ],
)
async def test_a_sleep_or_wake_up_that_means_nothing_names_its_field(
    daemon: Daemon, call: str, fields: dict[str, Any], field: str
) -> None:
    """INVALID_ARGUMENT, and the engine is not asked."""
    request = {"Sleep": control_pb2.SleepRequest, "WakeUp": control_pb2.WakeUpRequest}[call](**fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(daemon.control, call)(request, timeout=30)
    assert reason_of(caught.value) == "INVALID_FIELD"
    assert field_of(caught.value) == field
    assert daemon.engine.calls == []


async def test_a_drain_begins_the_shutdown_with_the_time_of_the_call(daemon: Daemon) -> None:
    """A repeat gets the same answer and changes nothing; requests are refused from then on."""
    for seconds in (2, 9):
        request = control_pb2.DrainRequest(drain_timeout=Duration(seconds=seconds))
        assert (await daemon.control.Drain(request)).state.phase == types_pb2.PHASE_DRAINING
    assert (daemon.stopped.cause, daemon.stopped.limit_s(30)) == ("Drain", 2.0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await daemon.generation.Generate(generation_pb2.GenerateRequest(text="a")).read()
    assert reason_of(refused.value) == "DRAINING"


async def test_a_drain_has_the_time_of_the_flags_and_refuses_none_at_all(daemon: Daemon) -> None:
    """The daemon goes on after a refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await daemon.control.Drain(control_pb2.DrainRequest(drain_timeout=Duration()))
    assert (reason_of(refused.value), field_of(refused.value)) == ("INVALID_FIELD", "drain_timeout")
    assert not daemon.stopped.is_set()
    await daemon.control.Drain(control_pb2.DrainRequest())
    assert daemon.stopped.is_set() and daemon.stopped.limit_s(30) == 30
