"""What is applied is what one attempt at a push meant, byte for byte, or nothing: attempts, ranks and conflicts."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import google_crc32c
import grpc
import pytest

from genserve.client import AsyncClient
from genserve.errors import PushConflictError, UnavailableError
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, weights_pb2
from genserve.weights import registry
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import PushHeader
from tests.rpc.frames import DATA, END, Frame, header, push, refused
from tests.rpc.segments import has_bytes
from tests.support.answers import answer_of
from tests.support.kept import kept
from tests.support.patience import STEP_S, until
from tests.support.scripted_daemon import Daemon, reason_of, serving

OTHER = hashlib.sha256(b"other").digest()
APPLIED = weights_pb2.PUSH_STATE_APPLIED


def part(data: bytes, start: int, end: int) -> Frame:
    """A chunk of other bytes than DATA's, perhaps."""
    piece = data[start:end]
    return Frame(chunk=weights_pb2.PushChunk(offset=start, data=piece, crc32c=google_crc32c.value(piece)))


class Rank:
    """A stream that is written frame by frame."""

    def __init__(self, daemon: Daemon, *frames: Frame) -> None:
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.has_sent_all = False
        self.send(*frames)
        self.call = daemon.weights.PushWeights(self._requests(), timeout=30)
        self.answer = asyncio.ensure_future(self._answered())

    async def _requests(self) -> AsyncIterator[Frame]:
        while True:
            frame = await self._frames.get()
            yield frame
            if frame.WhichOneof("frame") == "end":
                self.has_sent_all = True
                return

    async def _answered(self) -> str:
        """APPLIED, STAGED, or the reason of the error."""
        try:
            response = await answer_of(self.call)
        except grpc.aio.AioRpcError as error:
            return reason_of(error)
        return weights_pb2.PushState.Name(response.push.state).removeprefix("PUSH_STATE_")

    def send(self, *frames: Frame) -> None:
        for frame in frames:
            self._frames.put_nowait(frame)

    async def cut(self) -> None:
        """Gone without an end."""
        self.call.cancel()
        await asyncio.wait({self.answer})


async def until_received(daemon: Daemon, num_bytes: int) -> None:
    await until(lambda: has_bytes(daemon, num_bytes))


async def until_read(daemon: Daemon, rank: Rank) -> None:
    """The daemon has what the rank has sent: it answers a call that came after it on the same connection."""
    await until(lambda: rank.has_sent_all)
    for _ in range(2):
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())


async def until_left(daemon: Daemon) -> None:
    """No stream of the push is here."""
    await until(lambda: not daemon.registry.live.find("p1").num_attached)


async def digest_header(daemon: Daemon, **fields: Any) -> Frame:
    """The header of a further stream."""
    served = await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())
    manifest = served.manifest
    digest = hashlib.sha256()
    for t in sorted(manifest.tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, t.shape))
        digest.update(f"{t.name}\t{t.dtype}\t{shape}\t{t.offset}\t{t.length}\n".encode())
    return Frame(
        header=weights_pb2.PushHeader(
            **{"push_id": "p1", "weight_version": 1, "manifest_digest": digest.hexdigest(), **fields}
        )
    )


async def test_a_second_attempt_with_other_bytes_is_refused_whole(daemon: Daemon) -> None:
    """One rank of the first attempt had sent its half and died. Neither half of the second attempt is applied, and both
    of its ranks are told: what would be live otherwise is half of each."""
    first = await header(daemon, num_streams=2)
    dead = Rank(daemon, first, part(DATA, 0, 16))
    await until_received(daemon, 16)
    await dead.cut()
    await until_left(daemon)
    b = Rank(daemon, await digest_header(daemon, num_streams=2), part(OTHER, 16, 32), END)
    a = Rank(daemon, first, part(OTHER, 0, 16), END)
    assert await asyncio.wait_for(asyncio.gather(a.answer, b.answer), STEP_S) == ["PUSH_CONFLICT", "PUSH_CONFLICT"]
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})
    late = Rank(daemon, first, part(OTHER, 0, 32), END)
    assert await asyncio.wait_for(late.answer, STEP_S) == "PUSH_CONFLICT", "who comes late is told as well"
    report = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert report.push.state == weights_pb2.PUSH_STATE_FAILED
    assert "other bytes" in report.push.issues[0].description
    await daemon.weights.DiscardPush(weights_pb2.DiscardPushRequest(push_id="p1"))
    assert (await push(daemon, [await header(daemon), part(OTHER, 0, 32), END])).push.state == APPLIED


async def test_second_attempt_with_other_bytes_on_many_streams_is_refused_whole(daemon: Daemon) -> None:
    """The same with one caller: one of its streams meets old bytes, the others do not."""
    first = await header(daemon, num_streams=3)
    dead = Rank(daemon, first, part(DATA, 0, 10))
    await until_received(daemon, 10)
    await dead.cut()
    await until_left(daemon)
    streams = [Rank(daemon, first, part(OTHER, 0, 10), END)]
    for start, end in ((10, 20), (20, 32)):
        streams.append(Rank(daemon, await digest_header(daemon, num_streams=3), part(OTHER, start, end), END))
    answers = await asyncio.wait_for(asyncio.gather(*(stream.answer for stream in streams)), STEP_S)
    assert set(answers) == {"PUSH_CONFLICT"}
    assert daemon.engine.weight_version == 0


@pytest.mark.parametrize("left", ["staged", "failed"])
async def test_bytes_that_are_left_of_a_complete_push_do_not_go_live_for_another(daemon: Daemon, left: str) -> None:
    """Rank B has not changed and ends first; rank A has, and comes later. Neither is told that its bytes are live."""
    first = await header(daemon, num_streams=2)
    if left == "staged":
        staged = await header(daemon, action=weights_pb2.PUSH_ACTION_STAGE)
        await push(daemon, [staged, part(DATA, 0, 32), END])
    else:
        daemon.engine.fails["prepare_weights"] = RuntimeError("out of memory")
        await refused(daemon, [await header(daemon), part(DATA, 0, 32), END])
    b = Rank(daemon, await digest_header(daemon, num_streams=2), part(DATA, 16, 32), END)
    await until_read(daemon, b)
    assert not b.answer.done(), "the push was applied although one of its ranks had not come"
    a = Rank(daemon, first, part(OTHER, 0, 16), END)
    assert await asyncio.wait_for(asyncio.gather(a.answer, b.answer), STEP_S) == ["PUSH_CONFLICT", "PUSH_CONFLICT"]
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})


async def test_bytes_of_an_earlier_attempt_count_once_they_are_sent_again(daemon: Daemon) -> None:
    """A resume that sends only the rest is no proof that the rest is of the same version."""
    first = await header(daemon)
    await refused(daemon, [first, part(DATA, 0, 20)])
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert [(each.start, each.end) for each in asked.push.missing] == [(0, 32)]
    assert asked.push.received_bytes == 0
    error = await refused(daemon, [first, part(DATA, 20, 32), END])
    assert reason_of(error) == "PUSH_TRUNCATED"
    assert (await push(daemon, [first, part(DATA, 0, 32), END])).push.state == APPLIED


async def test_a_named_attempt_is_resumed_and_another_name_begins_anew(daemon: Daemon) -> None:
    """The name says that the bytes are the same: whoever has it was there."""
    await refused(daemon, [await header(daemon, attempt="one"), part(DATA, 0, 20)])
    error = await refused(daemon, [await header(daemon, attempt="two"), part(DATA, 20, 32), END])
    assert reason_of(error) == "PUSH_TRUNCATED"
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert [(each.start, each.end) for each in asked.push.missing] == [(0, 20)]
    response = await push(daemon, [await header(daemon, attempt="two"), part(DATA, 0, 20), END])
    assert response.push.state == APPLIED


async def test_ranks_of_two_attempts_at_once_are_refused(daemon: Daemon) -> None:
    """One is left over from before a restart: nothing is applied, and a third attempt begins anew."""
    old = Rank(daemon, await header(daemon, num_streams=2, attempt="old"), part(DATA, 0, 16))
    await until_received(daemon, 16)
    new = Rank(daemon, await header(daemon, num_streams=2, attempt="new"), part(OTHER, 16, 32), END)
    answers = await asyncio.wait_for(asyncio.gather(old.answer, new.answer), STEP_S)
    assert answers == ["PUSH_CONFLICT", "PUSH_CONFLICT"]
    third = [await header(daemon, attempt="third"), part(OTHER, 0, 32), END]
    assert (await push(daemon, third)).push.state == APPLIED
    assert daemon.engine.live == {"a": OTHER[:16], "b": OTHER[16:]}


async def test_an_attempt_that_comes_while_another_is_leaving_waits_for_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that cancels a push and pushes again is not in conflict with itself."""
    monkeypatch.setattr(registry, "LEAVE_TIMEOUT_S", STEP_S)
    old = Rank(daemon, await header(daemon, attempt="old"), part(DATA, 0, 16))
    await until_received(daemon, 16)
    new = Rank(daemon, await header(daemon, attempt="new"), part(DATA, 0, 32), END)
    await until_read(daemon, new)
    await old.cut()
    assert await asyncio.wait_for(new.answer, STEP_S) == "APPLIED"


async def test_other_bytes_for_a_push_that_is_served_are_refused(daemon: Daemon) -> None:
    """A repeat of what is live answers the same; other bytes were not applied, and nobody is told that they were."""
    first = await header(daemon)
    applied = await push(daemon, [first, part(DATA, 0, 32), END])
    again = await push(daemon, [first, part(DATA, 0, 32), END])
    assert (again.push, again.applied) == (applied.push, applied.applied)
    error = await refused(daemon, [first, part(DATA, 0, 16), part(OTHER, 16, 32), END])
    assert reason_of(error) == "PUSH_CONFLICT"
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}
    second = await header(daemon, push_id="p2", weight_version=2)
    await push(daemon, [second, part(OTHER, 0, 32), END])
    late = await push(daemon, [first, part(DATA, 0, 32), END])
    assert late.applied == applied.applied, "it was applied, and has been replaced since"


async def test_what_is_live_and_cannot_be_compared_is_not_taken_for_the_same() -> None:
    """The daemon keeps no bytes: another attempt may only ask; the attempt itself need not prove anything."""
    async with serving(ServeConfig(port=0, no_resident_weights=True)) as daemon:
        applied = await push(daemon, [await header(daemon, attempt="a"), part(DATA, 0, 32), END])
        for attempt in ("", "b"):
            error = await refused(daemon, [await header(daemon, attempt=attempt), part(DATA, 0, 32), END])
            assert reason_of(error) == "PUSH_CONFLICT"
            assert (await push(daemon, [await header(daemon, attempt=attempt), END])).applied == applied.applied
        again = await push(daemon, [await header(daemon, attempt="a"), part(DATA, 0, 32), END])
        assert again.applied == applied.applied


async def test_a_commit_that_meets_the_check_of_a_staged_push_applies_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not answered with what staging has come to."""
    from genserve.weights.push.staging import Staging

    loop, checking, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    check = Staging.tied_issues

    def slow(staging: Staging, tied: Any) -> Any:
        loop.call_soon_threadsafe(checking.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return check(staging, tied)

    monkeypatch.setattr(Staging, "tied_issues", slow)
    staged = await header(daemon, action=weights_pb2.PUSH_ACTION_STAGE)
    pushing = asyncio.ensure_future(push(daemon, [staged, part(DATA, 0, 32), END]))
    await checking.wait()
    request = weights_pb2.CommitPushRequest(push_id="p1")
    committing = asyncio.ensure_future(daemon.weights.CommitPush(request, timeout=30))
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # comes after it on the same connection
    go_on.set()
    assert (await pushing).push.state == weights_pb2.PUSH_STATE_STAGED
    assert (await committing).applied.active_version == 1
    assert daemon.engine.weight_version == 1


async def test_a_trainer_that_hangs_is_evicted_by_force(daemon: Daemon) -> None:
    """Its stream is told, another push goes on; without force it holds its place."""
    hung = Rank(daemon, await header(daemon), part(DATA, 0, 16))
    await until_received(daemon, 16)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.weights.DiscardPush(weights_pb2.DiscardPushRequest(push_id="p1"))
    assert reason_of(caught.value) == "APPLY_IN_PROGRESS"
    discarded = await daemon.weights.DiscardPush(weights_pb2.DiscardPushRequest(push_id="p1", force=True))
    assert discarded.push.received_bytes == 16
    assert await asyncio.wait_for(hung.answer, STEP_S) == "PUSH_NOT_FOUND"
    second = await header(daemon, push_id="p2")
    assert (await push(daemon, [second, part(OTHER, 0, 32), END])).push.state == APPLIED


async def test_chunks_that_bring_nothing_do_not_keep_a_push_alive(daemon: Daemon) -> None:
    """Empty ones, and ones that were there: only progress begins the time to live anew."""
    first = await header(daemon)
    first.header.staging_ttl.FromMilliseconds(300)
    hung = Rank(daemon, first, part(DATA, 0, 16))
    async with asyncio.timeout(STEP_S):
        while not hung.answer.done():
            hung.send(Frame(chunk=weights_pb2.PushChunk()), part(DATA, 0, 16))
            await asyncio.sleep(0.02)
    assert await hung.answer == "PUSH_TRUNCATED"


async def test_the_clients_of_two_attempts_are_told() -> None:
    """Our own client, as a trainer uses it: two ranks, and a second attempt with other weights."""
    numpy = pytest.importorskip("numpy")

    def tensors(fill: float) -> dict[str, Any]:
        return {"a": numpy.full(4, fill, "float32"), "b": numpy.full(8, fill, "float16")}

    checkpoint = CheckpointIndex({"a": CheckpointTensor("F32", (4,), 16), "b": CheckpointTensor("F16", (8,), 16)})
    async with serving(ServeConfig(port=0), checkpoint=checkpoint) as daemon, AsyncClient(daemon.address) as client:
        layout = await client.get_weights()
        options = {"version": 1, "push_id": "step-1", "layout": layout, "callers": 2, "timeout_s": STEP_S}
        dead = asyncio.create_task(client.push_weights({"a": tensors(1.0)["a"]}, **options))
        await until(lambda: has_bytes(daemon, 16, "step-1"))
        dead.cancel()
        await asyncio.wait({dead})
        results = await asyncio.gather(
            client.push_weights({"b": tensors(2.0)["b"]}, **options),
            client.push_weights({"a": tensors(2.0)["a"]}, **options),
            return_exceptions=True,
        )
    assert {type(result) for result in results} == {PushConflictError}
    assert daemon.engine.weight_version == 0


async def test_a_client_does_not_take_another_attempt_s_outcome_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream broke before a byte was compared, and GetPush says that the push was applied: with other bytes."""
    numpy = pytest.importorskip("numpy")
    async with serving(ServeConfig(port=0), checkpoint=None) as daemon, AsyncClient(daemon.address) as client:
        first = {"a": numpy.full(4, 1.0, "float32")}
        await client.push_weights(first, version=1, push_id="step-1")

        async def breaks(header: PushHeader) -> PushStream:
            monkeypatch.undo()
            raise UnavailableError("the connection broke")

        monkeypatch.setattr(daemon.registry, "open", breaks)
        with pytest.raises(PushConflictError):
            await client.push_weights({"a": numpy.full(4, 7.0, "float32")}, version=1, push_id="step-1")
        again = await client.push_weights(first, version=1, push_id="step-1")
    assert again.push.state == "applied"
    assert daemon.engine.live == {"a": first["a"].tobytes()}


async def test_what_is_refused_does_not_keep_what_was_sent(daemon: Daemon) -> None:
    """The error is remembered, and not the frames that it came through, which hold a message of any size."""
    first = await header(daemon)
    await refused(daemon, [first, part(DATA, 0, 16), part(OTHER, 0, 32), END])
    assert kept(daemon.registry, PushConflictError) and not kept(daemon.registry, TracebackType)
