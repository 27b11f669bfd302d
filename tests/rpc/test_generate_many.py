"""GenerateMany, as a client on the wire sees it, and through ours."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2

from genserve.control.conditions import Phase
from genserve.engine.generation import TextPrompt
from genserve.errors import (
    EngineDeadError,
    QueueFullError,
)
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, generation_pb2
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import Daemon, ScriptedStream, reason_of, serving, update

Request = generation_pb2.GenerateManyRequest
Response = generation_pb2.GenerateManyResponse
Call = "grpc.aio.StreamStreamCall[Request, Response]"


def generate(request_id: str, text: str = "hi") -> Request:
    """A request that begins a generation."""
    return Request(generate=generation_pb2.GenerateRequest(request_id=request_id, text=text))


async def opened(daemon: Daemon, *request_ids: str) -> tuple["Call", list[ScriptedStream]]:  # type: ignore[valid-type]
    """A stream with these requests running."""
    call = daemon.generation.GenerateMany(timeout=30)
    for request_id in request_ids:
        await call.write(generate(request_id))
    return call, [await daemon.stream(index) for index in range(len(request_ids))]


async def test_what_comes_in_one_step_is_one_message(daemon: Daemon) -> None:
    """An item for each request that gained something, with the fields that Generate has."""
    call, streams = await opened(daemon, "a", "b", "c")
    streams[0].put(update(1, first=True))
    streams[2].put(update(3, first=True))
    first = await call.read()
    assert [(i.request_id, list(i.response.outputs[0].token_ids)) for i in first.items] == [("a", [1]), ("c", [3])]
    assert [(i.response.request_id, i.response.prompt.num_tokens) for i in first.items] == [("a", 2), ("c", 2)]
    for stream in streams:
        stream.put(update(9, last=True))
    second = await call.read()
    assert [(i.request_id, i.response.HasField("usage")) for i in second.items] == [(i, True) for i in "abc"]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_half_closed_stream_ends_with_its_last_request(daemon: Daemon) -> None:
    """And not before: further requests may come while none runs."""
    call, (stream,) = await opened(daemon, "a")
    stream.put(update(1, first=True, last=True))
    await call.read()
    await call.write(generate("b"))
    await call.done_writing()
    following = await daemon.stream(1)
    following.put(update(2, first=True, last=True))
    assert (await call.read()).items[0].request_id == "b"
    assert await call.read() is grpc.aio.EOF


async def test_a_refused_request_is_an_item_and_the_others_go_on(daemon: Daemon) -> None:
    """With the code, reason and details that Generate would have."""
    call, (stream,) = await opened(daemon, "a")
    daemon.engine.refusal = QueueFullError("full", retry_after_s=1.5)
    await call.write(generate("b"))
    item = (await call.read()).items[0]
    assert (item.request_id, item.error.code) == ("b", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert item.error.details[0].Unpack(info) and item.error.details[1].Unpack(delay)
    assert (info.domain, info.reason, delay.retry_delay.ToMilliseconds()) == ("genserve", "QUEUE_FULL", 1500)

    await call.write(generate("c", text=""))
    item = (await call.read()).items[0]
    assert (item.request_id, item.error.code) == ("c", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    stream.put(update(1, first=True, last=True))
    assert (await call.read()).items[0].HasField("response")


async def test_a_request_that_fails_ends_alone(daemon: Daemon) -> None:
    """What it had given is the client's, and the others go on."""
    call, streams = await opened(daemon, "a", "b")
    streams[0].put(EngineDeadError("gone"))
    item = (await call.read()).items[0]
    assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.UNAVAILABLE.value[0])
    streams[1].put(update(1, first=True, last=True))
    assert (await call.read()).items[0].request_id == "b"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_requests_are_refused_while_draining_and_the_stream_stays(daemon: Daemon) -> None:
    """Those that run may end."""
    call, (stream,) = await opened(daemon, "a")
    enter_phase(daemon.board, Phase.DRAINING)
    await call.write(generate("b"))
    assert (await call.read()).items[0].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    stream.put(update(1, first=True, last=True))
    assert (await call.read()).items[0].request_id == "a"


async def test_abort_ends_one_of_this_stream_and_no_other(daemon: Daemon) -> None:
    """Ids that do not run here are ignored: they may have ended meanwhile, or be somebody else's. The engine is not
    asked by the id, which another client may use at a front end."""
    call, (first, second) = await opened(daemon, "a", "b")
    for request_id in ("elsewhere", "b"):
        await call.write(Request(abort=request_id))
    await until(lambda: second.is_aborted)
    assert not first.is_aborted
    assert daemon.engine.aborted_ids == []
    call.cancel()


async def test_an_abort_ends_a_request_that_is_being_admitted(daemon: Daemon) -> None:
    """As Abort does: it ends as ABORTED, for each of its sequences, in items and columns alike. The others are not held
    up by it, and its id is free."""
    call, (stream,) = await opened(daemon, "a")
    daemon.engine.admission.clear()
    daemon.engine.submitted.clear()
    for request_id, form in (("b", generation_pb2.GENERATE_MANY_FORM_COLUMNS), ("c", 0)):
        asked = generation_pb2.GenerateRequest(
            request_id=request_id, token_ids={"ids": [1, 2, 3]}, sampling={"n": 2}, output={"prompt_token_ids": True}
        )
        await call.write(Request(generate=asked, form=form))
    await until(lambda: len(daemon.engine.requests) == 3)
    stream.put(update(7, first=True))
    assert [item.request_id for item in (await call.read()).items] == ["a"]
    for request_id in ("b", "elsewhere", "c"):
        await call.write(Request(abort=request_id))
        if request_id == "elsewhere":
            continue
        (item,) = (await call.read()).items
        assert item.request_id == request_id and not item.slots
        assert [output.finish.reason for output in item.response.outputs] == [generation_pb2.FINISH_REASON_ABORTED] * 2
        assert list(item.response.prompt.token_ids) == [1, 2, 3] and item.response.usage.num_prompt_tokens == 3
    daemon.engine.admission.set()
    await call.write(generate("b"))
    (await daemon.stream(1)).put(update(8, first=True, last=True))
    assert [item.request_id for item in (await call.read()).items] == ["b"]
    assert daemon.engine.aborted_ids == []
    stream.put(update(9, last=True))
    await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_an_abort_ends_a_request_that_has_just_been_sent(daemon: Daemon) -> None:
    """In whatever step it is."""
    call = daemon.generation.GenerateMany(timeout=30)
    for number in range(50):
        await call.write(generate(str(number)))
        await call.write(Request(abort=str(number)))
    await call.done_writing()
    ended: list[str] = []

    async def read() -> None:
        async for response in call:
            ended.extend(item.request_id for item in response.items)

    def all_have_ended() -> bool:
        for stream in daemon.engine.streams:
            if stream.is_aborted and not stream.is_finished and stream.updates.empty():
                stream.put(update(1, first=True, last=True))  # as an engine does
        return len(ended) == 50

    reading = asyncio.create_task(read())
    await until(all_have_ended)
    await reading


async def test_a_request_with_the_id_of_one_that_is_being_admitted_is_refused(daemon: Daemon) -> None:
    """As one with the id of a request that runs."""
    daemon.engine.admission.clear()
    call = daemon.generation.GenerateMany(timeout=30)
    for _ in range(2):
        await call.write(generate("a"))
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.ALREADY_EXISTS.value[0])
    daemon.engine.admission.set()
    (await daemon.stream()).put(update(1, first=True, last=True))
    assert (await call.read()).items[0].HasField("response")
    call.cancel()


async def test_cancelling_ends_every_request(daemon: Daemon) -> None:
    """Although the engine has nothing to say."""
    call, streams = await opened(daemon, "a", "b")
    call.cancel()
    for stream in streams:
        await until(stream.closed.is_set)


async def test_request_under_admission_ends_when_the_client_disconnects(daemon: Daemon) -> None:
    """Nothing is left running."""
    call, (stream,) = await opened(daemon, "a")
    daemon.engine.admission.clear()
    daemon.engine.submitted.clear()
    await call.write(generate("b"))
    await daemon.engine.submitted.wait()
    call.cancel()
    await until(stream.closed.is_set)
    daemon.engine.admission.set()
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())
    assert all(each.closed.is_set() for each in daemon.engine.streams)


async def test_a_message_without_an_action_is_an_error_of_no_request(daemon: Daemon) -> None:
    """An item without an id: the requests of the stream go on."""
    call, (stream,) = await opened(daemon, "a")
    await call.write(Request())
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.code) == ("", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    stream.put(update(1, first=True, last=True))
    assert (await call.read()).items[0].request_id == "a"


async def test_an_error_that_nobody_foresaw_ends_its_request_alone(daemon: Daemon) -> None:
    """INTERNAL, with an id under which the log has the rest."""
    call, streams = await opened(daemon, "a", "b")
    streams[0].put(RuntimeError("a bug"))
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.INTERNAL.value[0])
    streams[1].put(update(1, first=True, last=True))
    assert (await call.read()).items[0].request_id == "b"


@pytest.mark.slow
async def test_refusals_come_in_messages_of_bounded_size(daemon: Daemon) -> None:
    """Every one of them, in order; the client must not be able to ask for a message that it cannot take."""
    names = [str(index) for index in range(2000)]
    call = daemon.generation.GenerateMany(iter([generate(name, text="") for name in names]), timeout=30)
    responses = [response async for response in call]
    assert [item.request_id for response in responses for item in response.items] == names
    assert max(len(response.items) for response in responses) <= 256


@pytest.mark.slow
async def test_a_client_that_does_not_read_its_refusals_is_not_read_either(daemon: Daemon) -> None:
    """Otherwise they would pile up in the daemon."""
    daemon.engine.refusal = QueueFullError("full" * 200)  # as long as one can be, so that gRPC's own buffers fill up
    num_requests = 2_000
    call = daemon.generation.GenerateMany(iter([generate(str(i)) for i in range(num_requests)]))
    await daemon.engine.submitted.wait()
    before, stuck = 0, 0
    while stuck < 20:
        await asyncio.sleep(0.02)
        stuck = stuck + 1 if len(daemon.engine.requests) == before else 0
        before = len(daemon.engine.requests)
    assert before < num_requests
    assert sum([len(response.items) async for response in call]) == num_requests


@pytest.mark.slow
async def test_client_that_leaves_its_aborted_requests_unread_is_not_read(daemon: Daemon) -> None:
    """A request that is ended while it is admitted counts nowhere in the engine: only here it could pile up."""
    daemon.engine.admission.clear()  # as while a long text is tokenised, or a constraint compiled
    num_requests = 1_000  # with answers of 3 MB, far more than gRPC itself keeps
    sampling = {"n": 256}  # an answer of 3 KiB

    def asked() -> Iterator[Request]:
        for index in range(num_requests):
            name = str(index)
            yield Request(generate=generation_pb2.GenerateRequest(request_id=name, text="x" * 8_000, sampling=sampling))
            yield Request(abort=name)

    call = daemon.generation.GenerateMany(asked())
    await daemon.engine.submitted.wait()
    before, stuck = 0, 0
    while stuck < 20:
        await asyncio.sleep(0.02)
        stuck = stuck + 1 if len(daemon.engine.requests) == before else 0
        before = len(daemon.engine.requests)
    assert before < num_requests
    assert sum([len(response.items) async for response in call]) == num_requests


async def test_a_request_that_no_honest_client_sends_is_refused_unread() -> None:
    """4 MiB for a context of 64 tokens, whatever the daemon's other messages may have; alone or in a stream."""
    large = generation_pb2.GenerateRequest(request_id="large", text="x" * (5 << 20))
    async with serving(ServeConfig(port=0, max_message_bytes=64 << 20)) as daemon:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await daemon.generation.Generate(large, timeout=30).read()
        assert reason_of(raised.value) == "MESSAGE_TOO_LARGE"
        call, (stream,) = await opened(daemon, "a")
        await call.write(Request(generate=large))
        (item,) = (await call.read()).items
        assert (item.request_id, item.error.code) == ("large", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        stream.put(update(1, first=True, last=True))
        assert (await call.read()).items[0].request_id == "a"


async def test_a_large_request_arrives_as_a_small_one_does(daemon: Daemon) -> None:
    """It is read in a thread."""
    text = "x" * 100_000
    call = daemon.generation.GenerateMany(iter([generate("a", text)]), timeout=30)
    (await daemon.stream()).put(update(1, first=True, last=True))
    assert [item.request_id async for response in call for item in response.items] == ["a"]
    assert daemon.engine.requests[0].prompt == TextPrompt(text)


async def test_a_client_that_does_not_read_leaves_the_updates_to_the_engine(daemon: Daemon) -> None:
    """Nothing is taken that cannot be written: the streams, which merge, are the only place where it piles up."""
    call, (stream,) = await opened(daemon, "a")
    large = update(1)
    large.outputs[0].text = "x" * 100_000
    async with asyncio.timeout(STEP_S):
        before, stuck = -1, 0
        while stuck < 20:
            stream.put(large)
            await asyncio.sleep(0.01)
            stuck = stuck + 1 if stream.updates.qsize() > before else 0
            before = stream.updates.qsize()
    call.cancel()
    await until(stream.closed.is_set)


async def test_no_message_comes_near_the_limit_of_clients(daemon: Daemon) -> None:
    """4 MiB by default; what is left over follows at once."""
    names = [str(index) for index in range(40)]
    call, streams = await opened(daemon, *names)
    for stream in streams:
        large = update(1, first=True, last=True)
        large.outputs[0].text = "x" * 200_000
        stream.put(large)
    sizes, seen = [], []
    while len(seen) < len(names):
        response = await call.read()
        sizes.append(response.ByteSize())
        seen += [item.request_id for item in response.items]
    assert seen == names and len(sizes) > 1
    assert max(sizes) < 1 << 20
