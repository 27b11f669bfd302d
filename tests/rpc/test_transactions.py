"""CommitPush, DiscardPush, PullWeights, Sleep and headers that are too large, as a client on the wire sees them."""

import hashlib

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from genserve.rpc.frames import push as push_frames
from genserve.rpc.weights import PULL_WRITE_TIMEOUT_S
from genserve.settings.config import ServeConfig
from genserve.tensors.chunk_frame import Chunk
from genserve.v1 import control_pb2, types_pb2, weights_pb2
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from tests.rpc.frames import DATA, END, Frame, chunk, header, push, refused
from tests.support.answers import answer_of
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.scripted_daemon import Daemon, field_of, reason_of, serving


async def stage(daemon: Daemon) -> None:
    """Push p1, staged."""
    await push(daemon, [await header(daemon, action=weights_pb2.PUSH_ACTION_STAGE), chunk(0, 32), END])


async def pull(daemon: Daemon, **fields: object) -> list[weights_pb2.PullWeightsResponse]:
    """All frames of a pull."""
    request = weights_pb2.PullWeightsRequest(**fields)  # type: ignore[arg-type]
    return [frame async for frame in daemon.weights.PullWeights(request, timeout=30)]


async def test_a_staged_push_is_committed_once(daemon: Daemon) -> None:
    """A repeat answers the same."""
    await stage(daemon)
    assert daemon.engine.weight_version == 0
    request = weights_pb2.CommitPushRequest(push_id="p1", expected_version=0)
    first = await daemon.weights.CommitPush(request, timeout=30)
    assert first.applied.active_version == first.state.weight_version == 1
    assert (first.push.push_id, first.push.state) == ("p1", weights_pb2.PUSH_STATE_APPLIED)
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}
    again = await daemon.weights.CommitPush(request, timeout=30)
    assert (again.push, again.applied) == (first.push, first.applied)


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (weights_pb2.CommitPushRequest(push_id="unknown"), "PUSH_NOT_FOUND", None),
        (weights_pb2.CommitPushRequest(push_id="p1", expected_version=7), "WEIGHT_VERSION_MISMATCH", None),
        (
            weights_pb2.CommitPushRequest(push_id="p1", apply=weights_pb2.ApplyOptions(pause_mode=99)),  # type: ignore[arg-type]
            "INVALID_FIELD",
            "apply.pause_mode",
        ),
    ],
)
async def test_a_commit_that_cannot_be_is_refused(
    daemon: Daemon, request_: weights_pb2.CommitPushRequest, reason: str, field: str | None
) -> None:
    """And the push stays staged."""
    await stage(daemon)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.CommitPush(request_, timeout=30)
    assert reason_of(caught.value) == reason
    if field is not None:
        assert field_of(caught.value) == field
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert asked.push.state == weights_pb2.PUSH_STATE_STAGED


async def prepare(daemon: Daemon, **fields: object) -> weights_pb2.Push:
    """Push p1, prepared."""
    opened = await header(daemon, action=weights_pb2.PUSH_ACTION_PREPARE, attempt="one", **fields)
    response = await push(daemon, [opened, chunk(0, 32), END])
    assert not response.HasField("applied")
    return response.push


def contents_of(daemon: Daemon) -> str:
    """The digest of DATA under the checkpoint's names, as PushHeader says it."""
    assert daemon.engine.prepared
    a, b = (hashlib.sha256(part).hexdigest() for part in (DATA[:16], DATA[16:]))
    return hashlib.sha256(f"a\tF32\t4\t{a}\nb\tBF16\t8\t{b}\n".encode()).hexdigest()


async def test_a_prepared_push_is_exchanged_by_its_commit(daemon: Daemon) -> None:
    """Who asks again is told again, and GetWeights tells whose weights are served."""
    told = await prepare(daemon)
    assert (told.state, told.content_digest) == (weights_pb2.PUSH_STATE_PREPARED, contents_of(daemon))
    assert await prepare(daemon) == told
    assert (await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))).push == told
    frames = await pull(daemon, push_id="p1")
    assert (frames[0].header.push_id, frames[0].header.content_digest) == ("p1", told.content_digest)
    assert b"".join(frame.chunk.data for frame in frames) == DATA
    refusal = await refused(daemon, [await header(daemon, push_id="p2", action=weights_pb2.PUSH_ACTION_PREPARE), END])
    assert (reason_of(refusal), refusal.code()) == ("STAGING_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
    committed = await daemon.weights.CommitPush(weights_pb2.CommitPushRequest(push_id="p1"), timeout=30)
    assert committed.push.state == weights_pb2.PUSH_STATE_APPLIED
    assert [timing.step for timing in committed.applied.timings][5:] == ["prepare", "pause", "commit", "resume"]
    assert daemon.engine.calls.count("prepare_weights") == 1
    served = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())
    assert (served.push_id, served.content_digest) == ("p1", told.content_digest)
    opened = (await pull(daemon))[0].header
    assert (opened.push_id, opened.content_digest) == ("p1", told.content_digest)


async def test_a_prepared_push_that_nobody_commits_is_gone(daemon: Daemon) -> None:
    """After the time that its header gives it."""
    await prepare(daemon, prepared_ttl=Duration(nanos=50_000_000))
    await until(lambda: not daemon.engine.prepared)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.CommitPush(weights_pb2.CommitPushRequest(push_id="p1"), timeout=30)
    assert reason_of(caught.value) == "PUSH_NOT_FOUND"


async def test_other_contents_than_the_header_says_are_refused(daemon: Daemon) -> None:
    """CHECKSUM_MISMATCH, and no commit gets around it."""
    error = await refused(daemon, [await header(daemon, content_digest="0" * 64), chunk(0, 32), END])
    assert reason_of(error) == "CHECKSUM_MISMATCH"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.CommitPush(weights_pb2.CommitPushRequest(push_id="p1"), timeout=30)
    assert reason_of(caught.value) == "CHECKSUM_MISMATCH"
    assert daemon.engine.weight_version == 0


async def test_a_discarded_push_is_gone(daemon: Daemon) -> None:
    """Its bytes are freed; a second discard finds nothing."""
    await stage(daemon)
    request = weights_pb2.DiscardPushRequest(push_id="p1")
    assert (await daemon.weights.DiscardPush(request, timeout=30)).push.received_bytes == 32
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.DiscardPush(request, timeout=30)
    assert reason_of(caught.value) == "PUSH_NOT_FOUND"


async def test_what_is_pulled_can_be_pushed_as_it_is(daemon: Daemon) -> None:
    """The frames are those of a push, byte for byte; nothing is resident before the first one here."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pull(daemon)
    assert reason_of(caught.value) == "WEIGHTS_NOT_RESIDENT"
    await push(daemon, [await header(daemon), chunk(0, 32), END])
    assert (await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())).resident
    frames = await pull(daemon, chunk_bytes=7)
    as_pushed = [Frame.FromString(frame.SerializeToString()) for frame in frames]
    assert as_pushed[0].header.weight_version == 1
    assert b"".join(frame.chunk.data for frame in as_pushed) == DATA
    assert (as_pushed[0].header.push_id, as_pushed[0].header.content_digest) == ("p1", "")
    as_pushed[0].header.weight_version, as_pushed[0].header.push_id = 2, "p2"
    assert (await push(daemon, as_pushed)).applied.active_version == 2


async def test_a_pull_goes_on_where_it_broke(daemon: Daemon) -> None:
    """Ranges of the same version only."""
    await push(daemon, [await header(daemon), chunk(0, 32), END])
    ranges = [weights_pb2.ByteRange(start=5, end=9), weights_pb2.ByteRange(start=30, end=32)]
    frames = await pull(daemon, weight_version=1, ranges=ranges)
    assert [(f.chunk.offset, f.chunk.data) for f in frames[1:-1]] == [(5, DATA[5:9]), (30, DATA[30:])]
    assert frames[-1].WhichOneof("frame") == "end"
    for fields, reason in (
        ({"weight_version": 2}, "WEIGHT_VERSION_MISMATCH"),
        ({"ranges": [weights_pb2.ByteRange(start=5, end=33)]}, "INVALID_FIELD"),
        ({"ranges": [weights_pb2.ByteRange(start=5, end=5)]}, "INVALID_FIELD"),
        ({"chunk_bytes": 1 << 31}, "INVALID_FIELD"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pull(daemon, **fields)
        assert reason_of(caught.value) == reason


async def test_a_header_that_is_too_large_is_not_parsed(daemon: Daemon) -> None:
    """Also in disguise: behind another field, or as a chunk that does not fill its frame."""
    honest = (await header(daemon)).SerializeToString()
    hostile = Frame(header=weights_pb2.PushHeader(push_id="p" * 2000)).SerializeToString()
    small_chunk = Frame(chunk=weights_pb2.PushChunk(data=b"x")).SerializeToString()
    large_chunk = Frame(chunk=weights_pb2.PushChunk(data=bytes(5000))).SerializeToString()
    parse = push_frames.frame_parser(1000)
    for data in (hostile, small_chunk + hostile, b"\x78\x01" + hostile, large_chunk + hostile, b"\x12" * 2000):
        assert isinstance(parse(data), push_frames.OversizedFrame)
    assert parse(honest) == Frame.FromString(honest).header
    assert parse(large_chunk) == Chunk(0, bytes(5000), None)


async def test_too_many_tensors_are_refused_by_the_size_of_the_header(daemon: Daemon) -> None:
    """Before any of them is an object."""
    tensor = weights_pb2.TensorSpec(name="n" * 20, dtype="BF16", shape=[1], length=2)
    manifest = weights_pb2.Manifest(tensors=[tensor] * 20_000, total_bytes=1)
    error = await refused(daemon, [Frame(header=weights_pb2.PushHeader(weight_version=1, manifest=manifest))])
    assert reason_of(error) == "MANIFEST_MISMATCH"
    assert "bytes" in (error.details() or "")


async def test_a_stream_without_a_header_ends(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be there for ever."""
    monkeypatch.setattr(push_frames, "HEADER_TIMEOUT_S", 0.05)
    call = daemon.weights.PushWeights(timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason_of(caught.value) == "DEADLINE_EXCEEDED"
    assert "header" in (caught.value.details() or "")


async def test_a_sleeping_engine_takes_no_push_and_wakes_up(daemon: Daemon) -> None:
    """FAILED_PRECONDITION / ENGINE_SLEEPING; afterwards everything works."""
    slept = await daemon.control.Sleep(control_pb2.SleepRequest(), timeout=30)
    assert slept.state.phase == types_pb2.PHASE_SLEEPING
    frames = [await header(daemon), chunk(0, 32), END]
    error = await refused(daemon, frames)
    assert reason_of(error) == "ENGINE_SLEEPING"
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    await daemon.control.WakeUp(control_pb2.WakeUpRequest(), timeout=30)
    assert (await push(daemon, frames)).applied.active_version == 1


async def test_a_puller_that_goes_away_lets_go_of_the_version(daemon: Daemon) -> None:
    """Its memory can be freed when it is replaced."""
    await push(daemon, [await header(daemon), chunk(0, 32), END])
    served = daemon.resident.require()
    call = daemon.weights.PullWeights(weights_pb2.PullWeightsRequest(chunk_bytes=1), timeout=30)
    await call.read()
    call.cancel()
    await until(lambda: not served.num_readers)


@pytest.mark.slow
async def test_a_puller_that_does_not_read_lets_go_of_the_version() -> None:
    """It is there, and takes nothing: its version would never be freed."""
    size_bytes = 32 << 20  # more than any window of HTTP/2 holds
    checkpoint = CheckpointIndex({"a": CheckpointTensor("U8", (size_bytes,), size_bytes)})
    async with serving(ServeConfig(port=0), checkpoint=checkpoint, max_staging_bytes=size_bytes) as daemon:
        manifest = (await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())).manifest
        opening = Frame(header=weights_pb2.PushHeader(push_id="p1", weight_version=1, manifest=manifest))
        pieces = range(0, size_bytes, 1 << 20)
        chunks = [Frame(chunk=weights_pb2.PushChunk(offset=offset, data=bytes(1 << 20))) for offset in pieces]
        await answer_of(daemon.weights.PushWeights(iter([opening, *chunks, END]), timeout=30))
        served = daemon.resident.require()
        call = daemon.weights.PullWeights(weights_pb2.PullWeightsRequest(), timeout=30)
        await call.read()
        assert served.num_readers == 1
        with advanced_clock() as clock:
            await clock.advance_until(lambda: not served.num_readers, PULL_WRITE_TIMEOUT_S)
        call.cancel()
