"""PushWeights, as a client on the wire sees it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2

from genserve.control.conditions import Phase
from genserve.settings.config import ServeConfig
from genserve.v1 import weights_pb2
from tests.rpc.frames import DATA, END, Frame, chunk, header, push, refused
from tests.rpc.segments import has_bytes
from tests.support.answers import answer_of
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import CHECKPOINT, Daemon, detail_of, field_of, reason_of, serving


async def test_a_push_is_applied_and_its_outcome_can_be_asked_for(daemon: Daemon) -> None:
    """Chunks in any order; the live weights are the bytes that were sent."""
    frames = [await header(daemon), chunk(20, 32), chunk(0, 7), chunk(7, 20), END]
    response = await push(daemon, frames)
    assert response.push.state == weights_pb2.PUSH_STATE_APPLIED
    assert (response.applied.previous_version, response.applied.active_version) == (0, 1)
    assert response.state.weight_version == 1
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    asked.applied.ClearField("longest_wait")  # known later, as the next test has it
    asked.applied.ClearField("discard")
    assert (asked.push, asked.applied) == (response.push, response.applied)


async def test_what_a_push_costs_is_told_when_it_is_known(daemon: Daemon) -> None:
    """The answer has the tokens, GetPush the rest a moment later, and a repeat the first answer."""
    daemon.engine.interruption.over.clear()
    frames = [await header(daemon), chunk(0, 32), END]
    response = await push(daemon, frames)
    assert response.applied.recomputed_tokens == 7
    assert not response.applied.HasField("longest_wait") and not response.applied.HasField("discard")
    daemon.engine.interruption.over.set()
    async with asyncio.timeout(STEP_S):
        while True:
            asked = (await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))).applied
            if asked.HasField("longest_wait") and asked.HasField("discard"):
                break
    assert (asked.recomputed_tokens, asked.longest_wait.ToMilliseconds()) == (7, 2500)
    assert (await push(daemon, frames)).applied == response.applied


async def test_a_stream_without_an_end_frame_is_truncated(daemon: Daemon) -> None:
    """Every byte was there: a half-close alone does not mean that the client was done."""
    error = await refused(daemon, [await header(daemon), chunk(0, 32)])
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.ABORTED, "PUSH_TRUNCATED")
    assert daemon.engine.weight_version == 0
    assert "commit_weights 1" not in daemon.engine.calls


async def test_a_cut_stream_can_be_resumed_where_it_was_cut(daemon: Daemon) -> None:
    """The bytes stay; GetPush tells which are missing; those alone complete the push, in the same attempt."""
    first = await header(daemon, attempt="a")
    await refused(daemon, [first, chunk(0, 20)])
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert [(missing.start, missing.end) for missing in asked.push.missing] == [(20, 32)]
    response = await push(daemon, [first, chunk(20, 32), END])
    assert response.push.state == weights_pb2.PUSH_STATE_APPLIED


async def test_a_client_that_vanishes_gives_its_push_free(daemon: Daemon) -> None:
    """Cancelled in the middle, the push is nobody's: another one takes its place."""
    first = await header(daemon)

    async def frames() -> AsyncIterator[Frame]:
        yield first
        yield chunk(0, 20)
        await asyncio.Event().wait()

    call = daemon.weights.PushWeights(frames())
    await until(lambda: has_bytes(daemon, 20))
    busy = await refused(daemon, [await header(daemon, push_id="p2"), chunk(0, 32), END])
    assert reason_of(busy) == "APPLY_IN_PROGRESS", "the control: while it is attached, it holds"
    call.cancel()
    await until(lambda: not daemon.registry.live.find("p1").num_attached)
    response = await push(daemon, [await header(daemon, push_id="p2"), chunk(0, 32), END])
    assert response.push.state == weights_pb2.PUSH_STATE_APPLIED


@pytest.mark.parametrize(
    "name", ["nothing at all", "no header", "an empty frame first", "a second header", "a frame after the end", "empty"]
)
async def test_frames_out_of_place_are_refused(daemon: Daemon, name: str) -> None:
    """INVALID_FIELD "frame", and nothing is applied."""
    first = await header(daemon)
    frames = {
        "nothing at all": [],
        "no header": [chunk(0, 32), END],
        "an empty frame first": [Frame(), END],
        "a second header": [first, first, chunk(0, 32), END],
        "a frame after the end": [first, chunk(0, 32), END, END],
        "empty": [first, Frame(), END],
    }[name]
    error = await refused(daemon, frames)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert field_of(error) == "frame"
    assert daemon.engine.weight_version == 0


async def test_a_frame_that_is_no_message_is_refused(daemon: Daemon) -> None:
    """Rather than an internal error."""
    method = daemon.channel.stream_unary("/genserve.v1.WeightService/PushWeights")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_of(method(iter([b"\xff\xff\xff"]), timeout=30))
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "frame")


async def test_a_flipped_bit_is_data_loss(daemon: Daemon) -> None:
    """A checksum of 0 is a checksum; none at all is fine."""
    first = await header(daemon)
    for crc32c in (0, 12345):
        error = await refused(daemon, [first, chunk(0, 32, crc32c=crc32c), END])
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")
    unchecked = Frame(chunk=weights_pb2.PushChunk(offset=0, data=DATA))
    assert (await push(daemon, [first, unchecked, END])).applied.active_version == 1


async def test_a_manifest_that_does_not_fit_names_its_tensors(daemon: Daemon) -> None:
    """Before a byte is sent: the stream is still open on the client's side."""
    first = await header(daemon)
    first.header.manifest.tensors[0].name = "z"
    error = await refused(daemon, [first])
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "MANIFEST_MISMATCH")
    violations = detail_of(error, error_details_pb2.BadRequest).field_violations
    assert [each.field for each in violations] == [f'header.manifest.tensors["{name}"]' for name in ("z", "a")]


async def test_a_manifest_of_absurd_length_is_refused_unread(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors are right; a thousand are no mistake, whatever they say: a million would take seconds to convert."""
    first = await header(daemon)
    monkeypatch.setattr("genserve.rpc.weights.push_header", lambda _: pytest.fail("it was converted"))
    too_many = 1 + CHECKPOINT.max_tensors - len(first.header.manifest.tensors)
    first.header.manifest.tensors.extend([weights_pb2.TensorSpec(name="c", dtype="nonsense")] * too_many)
    error = await refused(daemon, [first, END])
    assert reason_of(error) == "MANIFEST_MISMATCH"


async def test_validate_needs_no_bytes(daemon: Daemon) -> None:
    """A dry run."""
    response = await push(daemon, [await header(daemon, action=weights_pb2.PUSH_ACTION_VALIDATE), END])
    assert response.push.state == weights_pb2.PUSH_STATE_VALID
    assert not response.HasField("applied")
    assert daemon.engine.weight_version == 0


async def test_a_push_whose_time_is_up_ends_by_itself(daemon: Daemon) -> None:
    """A trainer that stalls in the middle is told, and holds no memory."""
    first = await header(daemon)
    first.header.staging_ttl.FromMilliseconds(300)

    async def frames() -> AsyncIterator[Frame]:
        yield first
        yield chunk(0, 20)
        await asyncio.Event().wait()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "PUSH_TRUNCATED")


async def test_pushes_are_refused_while_draining(daemon: Daemon) -> None:
    """UNAVAILABLE: another replica may take it."""
    first = await header(daemon)
    enter_phase(daemon.board, Phase.DRAINING)
    error = await refused(daemon, [first, chunk(0, 32), END])
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_an_unknown_push_is_not_found(daemon: Daemon) -> None:
    """It may have timed out."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="nope"))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "PUSH_NOT_FOUND")


async def test_digests_are_read_on_request_only(daemon: Daemon) -> None:
    """They take seconds."""
    plain = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())
    brief = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest(omit_manifest=True))
    assert plain.manifest.tensors and not brief.HasField("manifest")
    assert not plain.digests
    assert [tensor.name for tensor in plain.manifest.tensors] == sorted(CHECKPOINT.tensors)
    full = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest(include_digests=True))
    assert [digest.name for digest in full.digests] == ["w"]


async def test_weights_without_a_checkpoint_have_no_manifest() -> None:
    """Rather than an empty one, which would say that nothing has to be pushed."""
    async with serving(ServeConfig(port=0), checkpoint=None) as daemon:
        told = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())
        assert not told.HasField("manifest")
