"""The four calls of vLLM's own weight transfer, as a client on the wire sees them."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from genserve.v1 import control_pb2, types_pb2, weights_pb2
from tests.support.scripted_daemon import Daemon, field_of, reason_of

Init, Start = weights_pb2.InitWeightTransferRequest, weights_pb2.StartWeightUpdateRequest
Update, Finish = weights_pb2.UpdateWeightsRequest, weights_pb2.FinishWeightUpdateRequest


@pytest.fixture
def updating(daemon: Daemon) -> Daemon:
    """With a backend."""
    daemon.engine.backend = "scripted"
    return daemon


async def test_an_update_goes_through_four_calls(updating: Daemon) -> None:
    """Each carries the state; what vLLM takes is passed on as it is."""
    init = await updating.weights.InitWeightTransfer(Init(init_info='{"master_port": 29500}'), timeout=30)
    assert init.backend == "scripted"
    started = await updating.weights.StartWeightUpdate(Start(kv_policy=types_pb2.KV_POLICY_REUSE), timeout=30)
    assert started.update_id
    assert (started.requests_kept, started.state.phase) == (5, types_pb2.PHASE_APPLYING)
    request = Update(update_id=started.update_id, update_info='{"a": "new"}')
    updated = await updating.weights.UpdateWeights(request, timeout=30)
    assert updated.state.phase == types_pb2.PHASE_APPLYING
    finish = Finish(update_id=started.update_id, weight_version=9)
    finished = await updating.weights.FinishWeightUpdate(finish, timeout=30)
    assert (finished.applied.previous_version, finished.applied.active_version) == (0, 9)
    assert finished.applied.requests_kept == 5
    assert (finished.state.weight_version, finished.state.phase) == (9, types_pb2.PHASE_RUNNING)
    assert await updating.weights.FinishWeightUpdate(finish, timeout=30) == finished
    assert updating.engine.live["a"] == b"new"
    assert 'transfer_init {"master_port": 29500}' in updating.engine.calls
    assert "pause keep reuse" in updating.engine.calls


async def test_the_daemon_tells_its_backend(daemon: Daemon) -> None:
    """By name and as a feature; without one the calls are refused."""
    info = await daemon.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert (info.weight_transfer, "weight_transfer" in info.features) == ("", False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.StartWeightUpdate(Start(), timeout=30)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED")


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("InitWeightTransfer", Init(init_info="{"), "init_info"),
        ("InitWeightTransfer", Init(init_info="[]"), "init_info"),
        ("InitWeightTransfer", Init(init_info="[" * 100_000), "init_info"),
        ("InitWeightTransfer", Init(init_info="{}", timeout=Duration(seconds=-1)), "timeout"),
        ("StartWeightUpdate", Start(pause_mode=99), "pause_mode"),  # type: ignore[arg-type]
        ("StartWeightUpdate", Start(kv_policy=99), "kv_policy"),  # type: ignore[arg-type]
        ("StartWeightUpdate", Start(ttl=Duration(seconds=90_000)), "ttl"),
        ("UpdateWeights", Update(update_info="1"), "update_info"),
        ("FinishWeightUpdate", Finish(timeout=Duration()), "timeout"),
    ],
)
async def test_a_field_that_cannot_be_is_named(updating: Daemon, method: str, request_: object, field: str) -> None:
    """Before anything is paused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(updating.weights, method)(request_, timeout=30)
    assert (reason_of(caught.value), field_of(caught.value)) == ("INVALID_FIELD", field)
    assert updating.engine.calls == []


async def test_an_update_that_is_not_open_is_not_found(updating: Daemon) -> None:
    """NOT_FOUND, for a wrong id as well."""
    for request in (Update(update_info="[]"), Update(update_info="{}", update_id="u9")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await updating.weights.UpdateWeights(request, timeout=30)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "UPDATE_NOT_FOUND")
        await updating.weights.StartWeightUpdate(Start(update_id="u1"), timeout=30)
    await updating.weights.UpdateWeights(Update(update_info="{}"), timeout=30)
    await updating.weights.FinishWeightUpdate(Finish(), timeout=30)
