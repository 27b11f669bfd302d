"""The clients of GenerateMany, over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from genserve.client import AsyncClient, Client
from genserve.client.generation.many import Sequences
from genserve.control.conditions import Phase
from genserve.errors import (
    DrainingError,
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    UnavailableError,
)
from genserve.v1 import generation_pb2
from tests.support.kept import kept
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, update

Request = generation_pb2.GenerateManyRequest
Response = generation_pb2.GenerateManyResponse
Call = "grpc.aio.StreamStreamCall[Request, Response]"


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address) as opened_client:
        yield opened_client


async def answer(daemon: Daemon, count: int) -> None:
    """Ends so many requests, the last one first, each with its position as its token."""
    streams = [await daemon.stream(index) for index in range(count)]
    for index, stream in reversed(list(enumerate(streams))):
        stream.put(update(index, first=True, last=True))


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
        await until(stream.closed.is_set)


async def test_generate_many_raises_the_error_of_a_request_and_ends_the_others(
    daemon: Daemon, client: AsyncClient
) -> None:
    """An empty prompt is refused by the daemon."""
    with pytest.raises(GenserveError) as raised:
        await client.generate_many(["a", ""], timeout_s=5)
    assert raised.value.violations[0].field == "text"
    await until((await daemon.stream(0)).closed.is_set)


async def test_without_raising_errors_stand_with_what_there_is(daemon: Daemon, client: AsyncClient) -> None:
    """A request that fails half-way keeps its tokens."""
    generating = asyncio.create_task(client.generate_many(["a", "", "c"], raise_errors=False, stream_interval=1))
    (await daemon.stream(0)).put(update(5, first=True))
    (await daemon.stream(1)).put(update(6, first=True, last=True))
    (await daemon.stream(0)).put(EngineDeadError("gone"))
    first, second, third = await asyncio.wait_for(generating, STEP_S)
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
        aborted = await daemon.stream(1)
        await until(lambda: aborted.is_aborted)  # it is ignored once the request has ended
        (await daemon.stream(0)).put(update(1, first=True, last=True))
        item = await anext(many)
        assert (item.request_id, item.is_last, daemon.engine.requests[0].stop.max_tokens) == (first, True, 3)
        aborted.put(update(2, first=True, last=True))
        await many.done()
        assert [item.request_id async for item in many] == ["mine"]
        assert not (await daemon.stream(0)).is_aborted
        with pytest.raises(RuntimeError, match="no more"):
            await many.submit("d")


async def test_nothing_is_kept_of_requests_that_have_ended(daemon: Daemon, client: AsyncClient) -> None:
    """With their tokens or with an error: a stream may be open for weeks."""
    nothing = len(kept(Sequences()))
    async with client.stream_many() as many:
        for index, request_id in enumerate(("ends", "fails")):
            await many.submit("a", request_id=request_id, stream_interval=1)
            (await daemon.stream(index)).put(update(5, first=True))
            assert (await anext(many)).request_id == request_id
        (sequences,) = kept(many, Sequences)
        assert len(kept(sequences)) > nothing
        (await daemon.stream(0)).put(update(6, last=True))
        (await daemon.stream(1)).put(EngineDeadError("gone"))
        await many.done()
        assert {item.request_id async for item in many} == {"ends", "fails"}
        assert len(kept(sequences)) == nothing


async def test_submit_to_a_failed_stream_raises_its_error(daemon: Daemon) -> None:
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
    with refuses(InvalidFieldError, field="request_id"):
        await client.generate_many(["a"], request_id="one")


async def test_the_client_for_threads_has_both(daemon: Daemon) -> None:
    """In a thread, as the daemon is on this loop."""

    def use() -> tuple[list[list[int]], list[int]]:
        with Client(daemon.address) as client:
            many = client.generate_many(["a", "b"])
            completed = [position for position, _ in client.generate_as_completed(["c", "d"])]
            return [generation.token_ids for generation in many], completed

    using = asyncio.create_task(asyncio.to_thread(use))
    await answer(daemon, 2)
    for index in (3, 2):
        (await daemon.stream(index)).put(update(index, first=True, last=True))
    assert await using == ([[0], [1]], [1, 0])


async def test_draining_is_a_typed_error_in_the_client(daemon: Daemon, client: AsyncClient) -> None:
    """As of every other call."""
    enter_phase(daemon.board, Phase.DRAINING)
    (generation,) = await client.generate_many(["a"], raise_errors=False)
    assert isinstance(generation.error, DrainingError)
