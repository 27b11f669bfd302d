"""GenerateMany, as a client on the wire sees it, and through ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from google.rpc import error_details_pb2

from genserve.client import AsyncClient, Client
from genserve.control.state import Phase
from genserve.errors import DrainingError, EngineDeadError, GenserveError, QueueFullError, UnavailableError
from genserve.v1 import generation_pb2
from tests.rpc.conftest import Daemon, ScriptedStream, field_of, update

Request = generation_pb2.GenerateManyRequest
Response = generation_pb2.GenerateManyResponse
Call = "grpc.aio.StreamStreamCall[Request, Response]"


def generate(request_id: str, text: str = "hi") -> Request:
    """A request that begins a generation."""
    return Request(generate=generation_pb2.GenerateRequest(request_id=request_id, text=text))


async def opened(daemon: Daemon, *request_ids: str) -> tuple["Call", list[ScriptedStream]]:  # type: ignore[valid-type]
    """A stream with these requests running."""
    call = daemon.generation.GenerateMany(timeout=10)
    for request_id in request_ids:
        await call.write(generate(request_id))
    return call, [await daemon.stream(index) for index in range(len(request_ids))]


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address) as opened_client:
        yield opened_client


async def answer(daemon: Daemon, count: int) -> None:
    """Ends so many requests, the last one first, each with its position as its token."""
    streams = [await daemon.stream(index) for index in range(count)]
    for index, stream in reversed(list(enumerate(streams))):
        stream.put(update(index, first=True, last=True))


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


async def test_the_stream_ends_with_the_last_request_after_the_client_has_closed_its_side(daemon: Daemon) -> None:
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
    daemon.board.enter(Phase.DRAINING)
    await call.write(generate("b"))
    assert (await call.read()).items[0].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    stream.put(update(1, first=True, last=True))
    assert (await call.read()).items[0].request_id == "a"


async def test_abort_ends_one_of_this_stream_and_no_other(daemon: Daemon) -> None:
    """Ids that do not run here are ignored: they may have ended meanwhile, or be somebody else's."""
    call, _ = await opened(daemon, "a", "b")
    for request_id in ("elsewhere", "b"):
        await call.write(Request(abort=request_id))
    async with asyncio.timeout(5):
        while not daemon.engine.aborted_ids:
            await asyncio.sleep(0.01)
    assert daemon.engine.aborted_ids == ["b"]
    call.cancel()


async def test_cancelling_ends_every_request(daemon: Daemon) -> None:
    """Within a second, although the engine has nothing to say."""
    call, streams = await opened(daemon, "a", "b")
    call.cancel()
    for stream in streams:
        await asyncio.wait_for(stream.closed.wait(), 1)


async def test_a_request_that_is_being_admitted_when_the_client_goes_is_ended_too(daemon: Daemon) -> None:
    """Nothing is left running."""
    call, (stream,) = await opened(daemon, "a")
    daemon.engine.admission.clear()
    daemon.engine.submitted.clear()
    await call.write(generate("b"))
    await daemon.engine.submitted.wait()
    call.cancel()
    await asyncio.wait_for(stream.closed.wait(), 1)
    daemon.engine.admission.set()
    await asyncio.sleep(0.1)
    assert all(each.closed.is_set() for each in daemon.engine.streams)


async def test_a_message_without_an_action_ends_the_stream_and_its_requests(daemon: Daemon) -> None:
    """It is about no request, so the stream is what fails."""
    call, (stream,) = await opened(daemon, "a")
    await call.write(Request())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert (raised.value.code(), field_of(raised.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "action")
    await asyncio.wait_for(stream.closed.wait(), 1)


async def test_a_client_that_does_not_read_leaves_the_updates_to_the_engine(daemon: Daemon) -> None:
    """Nothing is taken that cannot be written: the streams, which merge, are the only place where it piles up."""
    call, (stream,) = await opened(daemon, "a")
    large = update(1)
    large.outputs[0].text = "x" * 100_000
    async with asyncio.timeout(20):
        before, stuck = -1, 0
        while stuck < 20:
            stream.put(large)
            await asyncio.sleep(0.01)
            stuck = stuck + 1 if stream.updates.qsize() > before else 0
            before = stream.updates.qsize()
    call.cancel()
    await asyncio.wait_for(stream.closed.wait(), 1)


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


async def test_generate_many_returns_in_the_order_of_the_prompts(daemon: Daemon, client: AsyncClient) -> None:
    """Whatever the order in which they end."""
    answering = asyncio.create_task(answer(daemon, 5))
    generations = await client.generate_many([[1], [2], [3], [4], [5]], max_tokens=1)
    await answering
    assert [generation.token_ids for generation in generations] == [[0], [1], [2], [3], [4]]
    assert {request.output.stream_interval for request in daemon.engine.requests} == {0}
    assert len({generation.request_id for generation in generations}) == 5


async def test_generate_as_completed_gives_each_when_it_ends(daemon: Daemon, client: AsyncClient) -> None:
    """The last one first here; leaving early ends the others."""
    async with aclosing(client.generate_as_completed(["a", "b", "c"])) as completed:
        first = asyncio.ensure_future(anext(completed))
        (await daemon.stream(2)).put(update(7, first=True, last=True))
        position, generation = await first
        assert (position, generation.token_ids, generation.error) == (2, [7], None)
    for stream in daemon.engine.streams[:2]:
        await asyncio.wait_for(stream.closed.wait(), 1)


async def test_generate_many_raises_the_error_of_a_request_and_ends_the_others(
    daemon: Daemon, client: AsyncClient
) -> None:
    """An empty prompt is refused by the daemon."""
    with pytest.raises(GenserveError) as raised:
        await client.generate_many(["a", ""], timeout_s=5)
    assert raised.value.violations[0].field == "text"
    await asyncio.wait_for((await daemon.stream(0)).closed.wait(), 1)


async def test_without_raising_errors_stand_with_what_there_is(daemon: Daemon, client: AsyncClient) -> None:
    """A request that fails half-way keeps its tokens."""
    generating = asyncio.create_task(client.generate_many(["a", "", "c"], raise_errors=False, stream_interval=1))
    (await daemon.stream(0)).put(update(5, first=True))
    (await daemon.stream(1)).put(update(6, first=True, last=True))
    (await daemon.stream(0)).put(EngineDeadError("gone"))
    first, second, third = await asyncio.wait_for(generating, 5)
    assert (first.token_ids, type(first.error)) == ([5], EngineDeadError)
    assert (second.token_ids, second.error.reason if second.error else "") == ([], "INVALID_FIELD")
    assert (third.token_ids, third.error) == ([6], None)


async def test_requests_of_a_stream_are_submitted_and_aborted_at_any_time(daemon: Daemon, client: AsyncClient) -> None:
    """By ids that are given or minted; one that runs cannot be given again."""
    async with client.stream_many() as many:
        first = await many.submit("a", max_tokens=3)
        await many.submit("b", request_id="mine")
        with pytest.raises(ValueError, match="mine"):
            await many.submit("c", request_id="mine")
        await many.abort("mine")
        (await daemon.stream(0)).put(update(1, first=True, last=True))
        item = await anext(many)
        assert (item.request_id, item.is_last, daemon.engine.requests[0].stop.max_tokens) == (first, True, 3)
        (await daemon.stream(1)).put(update(2, first=True, last=True))
        await many.done()
        assert [item.request_id async for item in many] == ["mine"]
        assert daemon.engine.aborted_ids == ["mine"]
        with pytest.raises(RuntimeError, match="no more"):
            await many.submit("d")


async def test_a_stream_that_failed_says_why_to_who_submits(daemon: Daemon) -> None:
    """Not only to who reads."""
    async with AsyncClient("127.0.0.1:1") as nowhere, nowhere.stream_many() as many:
        with pytest.raises(UnavailableError):
            await many.submit("a")
    async with AsyncClient("127.0.0.1:1") as nowhere:
        with pytest.raises(UnavailableError):
            await nowhere.generate_many(["a", "b"])


async def test_no_prompts_are_no_generations(daemon: Daemon, client: AsyncClient) -> None:
    """And an id for many is refused."""
    assert await client.generate_many([]) == []
    with pytest.raises(ValueError, match="request_id"):
        await client.generate_many(["a"], request_id="one")


async def test_the_client_for_threads_has_both(daemon: Daemon) -> None:
    """In a thread, as the daemon is on this loop."""
    daemon.board.enter(None)

    def use() -> tuple[list[list[int]], list[int]]:
        with Client(daemon.address) as client:
            many = client.generate_many(["a", "b"])
            completed = [position for position, _ in client.generate_as_completed(["c", "d"])]
            return [generation.token_ids for generation in many], completed

    using = asyncio.create_task(asyncio.to_thread(use))
    await answer(daemon, 2)
    for index in (3, 2):
        (await daemon.stream(index)).put(update(index, first=True, last=True))
    assert await asyncio.wait_for(using, 10) == ([[0], [1]], [1, 0])


async def test_draining_is_a_typed_error_in_the_client(daemon: Daemon, client: AsyncClient) -> None:
    """As of every other call."""
    daemon.board.enter(Phase.DRAINING)
    (generation,) = await client.generate_many(["a"], raise_errors=False)
    assert isinstance(generation.error, DrainingError)
