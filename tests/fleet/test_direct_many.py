"""Many requests over one stream of a client that calls replicas itself."""

import asyncio
from dataclasses import replace

import pytest

from genserve.client import AsyncClient, ClientClosedError, ManyItem
from genserve.client.generation.many import ManyStream, Sequences, StreamOverError
from genserve.client.generation.options import GenerateOptions
from genserve.engine.generation import FinishReason
from genserve.errors import (
    DeadlineError,
    GenserveError,
    InvalidFieldError,
    PromptTooLongError,
    ReplicaLostError,
    UnavailableError,
)
from genserve.routing.replica import ReplicaState
from tests.fleet.direct_fleet import DIRECT, QUIET, direct_fleet
from tests.fleet.scripted_fleet import tokens
from tests.fleet.talking_engine import continued, let_talk
from tests.support.kept import kept
from tests.support.patience import STEP_S, turns, until

READY = ReplicaState.READY


async def item_of(many: ManyStream, request_id: str) -> ManyItem:
    """The next one of a request."""
    async with asyncio.timeout(STEP_S):
        async for item in many:
            if item.request_id == request_id:
                return item
    raise AssertionError("the stream is over")


async def test_the_streams_of_replicas_are_one() -> None:
    """Every answer is whole, in whatever form the replicas tell their tokens, and each replica has its share."""
    async with direct_fleet(direct=QUIET) as fleet:
        for version, daemon in enumerate(fleet.daemons):
            let_talk(daemon.engine, version)
        prompts = [[number, 7] for number in range(60)]
        generations = await fleet.client.generate_many(prompts, max_tokens=40, text=False, stream_interval=1)
        assert [each.token_ids for each in generations] == [continued(prompt, 40) for prompt in prompts]
        assert {each.sequences[0].weight_spans[0][0] for each in generations} == {0, 1, 2}
        assert fleet.num_submitted == [20, 20, 20]
        assert all(each.inflight == 0 for each in fleet.known.replicas())


async def test_an_error_ends_its_request_alone() -> None:
    """Of a replica, or of the client itself."""
    async with direct_fleet(1) as fleet, fleet.client.stream_many() as many:
        await many.submit([1], request_id="runs")
        _, engine = await fleet.running("runs")
        fleet.daemons[0].engine.refusal = PromptTooLongError("too long")
        await many.submit([1], request_id="long")
        assert isinstance((await item_of(many, "long")).error, PromptTooLongError)
        await many.submit([1], request_id="resumed", resume=True)
        error = (await item_of(many, "resumed")).error
        assert isinstance(error, InvalidFieldError) and error.violations[0].field == "resume"
        assert (await fleet.client.abort(["resumed"])).unknown_ids == ["resumed"], "it is over"
        engine.put(tokens([5], prompt=1, finish=FinishReason.EOS))
        item = await item_of(many, "runs")
        assert item.delta is not None and item.delta.outputs[0].token_ids == [5]
        await many.done()
        assert [item async for item in many] == []


async def test_a_replica_that_dies_ends_what_it_has_begun() -> None:
    """What it has not begun goes elsewhere, and so does what may be resumed."""
    together = replace(DIRECT, policies="session,requests")
    async with direct_fleet(2, together) as fleet, fleet.client.stream_many() as many:
        await fleet.client.wait_ready(20)
        await fleet.until_known(READY, READY)
        for request_id in ("begun", "new", "resumed"):
            options: GenerateOptions = {"resume": request_id == "resumed", "text": False, "max_tokens": 3}
            await many.submit([1], request_id=request_id, session_id="one", **options)
        engines = {each: (await fleet.running(each)) for each in ("begun", "new", "resumed")}
        (lost,) = {number for number, _ in engines.values()}
        for request_id in ("begun", "resumed"):
            engines[request_id][1].put(tokens([5, 6], prompt=1))
            await item_of(many, request_id)
        fleet.links[lost].kill()
        error = (await item_of(many, "begun")).error
        assert isinstance(error, ReplicaLostError) and error.metadata["replica"] == fleet.links[lost].address
        for request_id, last, start in (("new", [5, 6, 7], 0), ("resumed", [7], 0)):
            number, again = await fleet.running(request_id, engines[request_id][1])
            assert number == 1 - lost
            again.put(tokens(last, start, prompt=1, finish=FinishReason.LENGTH))
            item = await item_of(many, request_id)
            assert item.delta is not None and item.delta.outputs[0].token_ids == last
            assert item.delta.outputs[0].finish is not None and item.delta.outputs[0].finish.num_tokens == 3
        (sequences,) = kept(many, Sequences)
        assert len(kept(sequences)) == len(kept(Sequences())), "the slots of those that have ended are free"


async def test_requests_are_aborted_also_after_the_last_one_was_sent() -> None:
    """Without the router."""
    async with direct_fleet(1) as fleet, fleet.client.stream_many() as many:
        for request_id in ("a", "b"):
            await many.submit([1], request_id=request_id)
        engines = [(await fleet.running(each))[1] for each in ("a", "b")]
        fleet.router_link.kill()
        await many.abort("a")
        await until(lambda: engines[0].is_aborted)
        await many.done()
        await many.abort("b")
        await until(lambda: engines[1].is_aborted)
        with pytest.raises(StreamOverError):
            await many.submit([1])


@pytest.mark.parametrize("is_done", [False, True], ids=["while more may come", "after the last one"])
async def test_requests_are_aborted_before_the_fleet_is_known(is_done: bool) -> None:
    """By their call, and by their ids: the router says nothing yet."""
    async with direct_fleet(1) as fleet, fleet.client.stream_many() as many:
        fleet.router_link.silence()
        for request_id in ("a", "b", "c"):
            await many.submit([1, 2], request_id=request_id)
        single = asyncio.create_task(fleet.client.generate([1, 2], request_id="single"))
        await turns()
        if is_done:
            await many.done()
            for request_id in ("c", "b"):
                await many.abort(request_id)
        with pytest.raises(GenserveError):
            await fleet.client.abort(["a", "b", "c", "single"], timeout_s=0.2)  # the router is asked as well
        assert (await single).sequences[0].finish_reason == "aborted"
        for request_id in ("a", "b", "c"):
            item = await anext(many)
            assert item.request_id == request_id and item.delta is not None
            finish = item.delta.outputs[0].finish
            assert finish is not None and finish.reason == "aborted" and item.is_last
        assert fleet.num_submitted == [0]


async def test_closing_the_stream_ends_its_requests() -> None:
    """In every replica."""
    async with direct_fleet(2) as fleet:
        completed = fleet.client.generate_as_completed([[number] for number in range(8)])
        reading = asyncio.create_task(anext(completed))
        await until(lambda: sum(len(each.engine.streams) for each in fleet.daemons) == 8)
        reading.cancel()
        await completed.aclose()
        for daemon in fleet.daemons:
            for engine in daemon.engine.streams:
                await until(engine.closed.is_set)
        assert all(each.inflight == 0 for each in fleet.known.replicas())


async def test_the_deadline_is_that_of_the_stream() -> None:
    """Its requests end with it."""
    async with direct_fleet(1) as fleet:
        streams = fleet.daemons[0].engine.streams

        async def generate() -> None:
            await many.submit([1], request_id="a")
            await item_of(many, "a")

        for timeout_s in (0.5, 5.0, 25.0):  # a busy machine may take longer to bring it there
            many = fleet.client.stream_many(timeout_s=timeout_s)
            with pytest.raises(DeadlineError):
                await generate()
            if streams:
                break
        await until(streams[0].closed.is_set)
        with pytest.raises(DeadlineError):
            await many.submit([1])


async def test_an_id_is_used_once_at_a_time() -> None:
    """In a stream. Another one does not hear of it."""
    async with direct_fleet(1) as fleet, fleet.client.stream_many() as many, fleet.client.stream_many() as other:
        await many.submit([1], request_id="a")
        _, engine = await fleet.running("a")
        with pytest.raises(ValueError, match="'a'"):
            await many.submit([1], request_id="a")
        engine.put(tokens([5], prompt=1, finish=FinishReason.EOS))
        assert (await item_of(many, "a")).is_last
        await many.submit([1], request_id="a")
        await fleet.running("a", engine)
        await other.done()
        assert [item async for item in other] == []


@pytest.mark.slow
async def test_client_reads_ahead_only_a_few_messages() -> None:
    """The client keeps a few messages. The others wait in the network and in the replica, and none is lost."""
    async with direct_fleet(1, direct=QUIET) as fleet, fleet.client.stream_many() as many:
        await many.submit([1], request_id="a", stream_interval=1, max_tokens=100_000, text=False)
        _, engine = await fleet.running("a")
        # 32 KiB a message: three times what the connections and their windows hold.
        count, ids = 600, list(range(16_000))
        engine.put(tokens(ids, prompt=1))
        await item_of(many, "a")
        for number in range(1, count):
            last = FinishReason.LENGTH if number == count - 1 else None
            engine.put(tokens(ids, len(ids) * number, finish=last))
        let_talk(fleet.daemons[0].engine, 0)
        before, left = count, count - 1
        while left < before:  # until nothing more is taken while others come and go
            for _ in range(20):
                await fleet.client.generate([2], max_tokens=1, text=False)  # on the same connection
            before, left = left, engine.updates.qsize()
        assert left > 0
        await many.done()
        num_read = 1
        async for item in many:
            assert item.delta is not None
            for output in item.delta.outputs:
                assert output.token_ids == ids
                num_read += 1
        assert num_read == count


async def test_without_a_router_the_requests_fail() -> None:
    """Each with the error, so that those of a stream that runs go on."""
    async with AsyncClient("127.0.0.1:1", direct=DIRECT) as client:
        generations = await client.generate_many([[1], [2]], raise_errors=False, timeout_s=20)
        assert [type(each.error) for each in generations] == [UnavailableError] * 2
        with pytest.raises(UnavailableError):
            await client.generate_many([[1]], timeout_s=20)


async def test_calls_of_a_client_that_is_closed_at_once_end() -> None:
    """They have begun, and nothing of them was done yet."""
    async with direct_fleet(1) as fleet:
        stream, many = fleet.client.stream([1]), fleet.client.stream_many()
        await fleet.client.close()
        for reading in (anext(stream), anext(many)):
            with pytest.raises(ClientClosedError):
                await asyncio.wait_for(reading, STEP_S)
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(many.submit([1]), STEP_S)
