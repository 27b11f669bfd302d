"""GenerateMany through a router, as a client on the wire sees it."""

import asyncio

import grpc
import pytest

from genserve.client import AsyncClient
from genserve.control.conditions import Phase
from genserve.engine.generation import FinishReason
from genserve.errors import DrainingError, InvalidFieldError, QueueFullError, ReplicaLostError
from genserve.forward import leg
from genserve.v1 import generation_pb2
from genserve.wire.literals import SLOTS_PER_CALL
from tests.fleet.scripted_fleet import ScriptedFleet, scripted_fleet, tokens
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import ScriptedStream

Request = generation_pb2.GenerateManyRequest
Response = generation_pb2.GenerateManyResponse
COLUMNS = generation_pb2.GENERATE_MANY_FORM_COLUMNS
Call = "grpc.aio.StreamStreamCall[Request, Response]"


def generate(request_id: str, **fields: object) -> Request:
    """A request that begins a generation, with its output in columns."""
    message = generation_pb2.GenerateRequest(request_id=request_id, token_ids={"ids": [1, 2, 3]}, **fields)
    return Request(generate=message, form=COLUMNS)


async def opened(router: ScriptedFleet, *request_ids: str) -> tuple["Call", dict[str, tuple[int, ScriptedStream]]]:  # type: ignore[valid-type]
    """A stream with these requests running, and where each runs."""
    call = router.generation.GenerateMany(timeout=20)
    where = {}
    for request_id in request_ids:
        await call.write(generate(request_id))
        where[request_id] = await router.running(request_id)
    return call, where


async def ended(call: "Call") -> bool:  # type: ignore[valid-type]
    """Whether the stream ends well, after the client has closed its side."""
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return await call.code() is grpc.StatusCode.OK


async def test_requests_go_to_all_replicas_and_their_slots_differ(router: ScriptedFleet) -> None:
    """Each replica numbers its own; together no number is there twice."""
    call, where = await opened(router, "a", "b", "c")
    assert {number for number, _ in where.values()} == {0, 1, 2}
    slots = {}
    for request_id, (_, stream) in where.items():
        stream.put(tokens([1], prompt=3))
        (item,) = (await call.read()).items
        assert item.request_id == request_id
        slots[request_id] = list(item.slots)
    assert sorted(slots.values()) == [[0], [SLOTS_PER_CALL], [2 * SLOTS_PER_CALL]]
    for request_id, (_, stream) in where.items():
        stream.put(tokens([5], 1))
        response = await call.read()
        assert not response.items
        assert [list(columns.slots) for columns in response.columns] == [slots[request_id]]
    for _, stream in where.values():
        stream.put(tokens([9], 2, finish=FinishReason.EOS))
        await call.read()
    assert await ended(call)
    await until(lambda: all(member.inflight == 0 for member in router.fleet.members))


async def test_messages_pass_as_they_came(router: ScriptedFleet) -> None:
    """Byte for byte: what a daemon answers directly."""
    raw = router.channel.stream_stream("/genserve.v1.GenerationService/GenerateMany")
    direct = router.daemons[0].channel.stream_stream("/genserve.v1.GenerationService/GenerateMany")
    answers = []
    for name, method in (("via", raw), ("direct", direct)):
        call = method(timeout=20)
        await call.write(generate("a").SerializeToString())
        _, stream = await router.running("a")
        frames = []
        for update in (tokens([1], prompt=3), tokens([5, 6], 1), tokens([9], 3, finish=FinishReason.EOS)):
            stream.put(update)
            frames.append(await call.read())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF, name
        answers.append(frames)
    assert answers[0] == answers[1]


async def test_lost_replica_ends_delivered_requests_and_the_rest_goes_elsewhere(router: ScriptedFleet) -> None:
    """The stream goes on, and so do the requests of the others."""
    call, where = await opened(router, "a", "b", "c", "d", "e", "f")
    victim, begun = where["a"]
    waiting = next(each for each, (number, _) in where.items() if number == victim and each != "a")
    begun.put(tokens([1], prompt=3))
    await call.read()
    router.links[victim].kill()
    (item,) = (await call.read()).items
    assert item.request_id == "a" and "was lost" in item.error.message
    number, stream = await router.running(waiting, where[waiting][1])
    assert number != victim
    where[waiting] = number, stream
    del where["a"]
    for request_id, (_, each) in where.items():
        each.put(tokens([9], prompt=3, finish=FinishReason.EOS))
        (item,) = (await call.read()).items
        assert item.request_id == request_id and item.response.HasField("usage")
    assert await ended(call)


async def test_a_refusal_is_not_told_if_another_replica_takes_the_request(router: ScriptedFleet) -> None:
    """Of a full one, and of one that shuts down. If all are full, that is told."""
    router.daemons[0].engine.refusal = QueueFullError("full", retry_after_s=1.5)
    router.daemons[1].engine.refusal = DrainingError("it shuts down")
    with router.busy(2):
        call, where = await opened(router, "a", "b")
    assert [number for number, _ in where.values()] == [2, 2]
    assert router.num_submitted == [2, 2, 2], "they were not tried where they are refused"
    enter_phase(router.daemons[1].board, Phase.DRAINING)
    await until(lambda: len(router.fleet.ready) == 2)
    router.daemons[2].engine.refusal = QueueFullError("full", retry_after_s=1.5)
    await call.write(generate("c"))
    (item,) = (await call.read()).items
    assert item.request_id == "c" and item.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _, stream in where.values():
        stream.put(tokens([9], prompt=3, finish=FinishReason.EOS))
        await call.read()
    assert await ended(call)


async def test_other_refusals_pass_unchanged(router: ScriptedFleet) -> None:
    """They end their request alone. What the router itself refuses looks the same."""
    for daemon in router.daemons:
        daemon.engine.refusal = InvalidFieldError.of("sampling.top_p", "is wrong")
    call = router.generation.GenerateMany(timeout=20)
    await call.write(generate("a"))
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.message) == ("a", "sampling.top_p: is wrong")
    await call.write(generate("b", session_id="x" * 257))
    (item,) = (await call.read()).items
    assert item.request_id == "b" and "session_id" in item.error.message
    await call.write(Request())
    (item,) = (await call.read()).items
    assert item.request_id == "" and "action" in item.error.message
    assert await ended(call)
    assert sum(router.num_submitted) == 1


async def test_an_id_is_taken_while_its_request_runs(router: ScriptedFleet) -> None:
    """On whichever replica; afterwards it is free at once."""
    call, where = await opened(router, "a")
    await call.write(generate("a"))
    (item,) = (await call.read()).items
    assert item.error.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    where["a"][1].put(tokens([9], prompt=3, finish=FinishReason.EOS))
    await call.read()
    await call.write(generate("a"))
    _, stream = await router.running("a", where["a"][1])
    stream.put(tokens([9], prompt=3, finish=FinishReason.EOS))
    assert (await call.read()).items[0].response.HasField("usage")
    assert await ended(call)


async def test_an_abort_goes_where_the_request_runs(router: ScriptedFleet) -> None:
    """And to no other."""
    call, where = await opened(router, "a", "b", "c")
    await call.write(Request(abort="b"))
    await until(lambda: where["b"][1].is_aborted)
    assert not where["a"][1].is_aborted and not where["c"][1].is_aborted
    call.cancel()


async def test_a_request_that_waits_holds_up_nobody_and_can_be_aborted(router: ScriptedFleet) -> None:
    """Its adapter is on no replica that is there."""
    call, where = await opened(router, "a")
    await router.alone(where["a"][0])
    enter_phase(router.daemons[where["a"][0]].board, Phase.DRAINING)
    await until(lambda: not router.fleet.ready)
    await call.write(generate("b"))
    where["a"][1].put(tokens([1], prompt=3))
    assert (await call.read()).items[0].request_id == "a"
    await call.write(Request(abort="b"))
    (item,) = (await call.read()).items
    assert item.request_id == "b" and item.response.HasField("usage")
    assert item.response.outputs[0].finish.reason == generation_pb2.FINISH_REASON_ABORTED
    where["a"][1].put(tokens([9], 1, finish=FinishReason.EOS))
    await call.read()
    assert await ended(call)


async def test_a_request_that_waits_in_vain_ends_alone(impatient_router: ScriptedFleet) -> None:
    """With NO_REPLICA."""
    for link in impatient_router.links:
        link.kill()
    await until(lambda: not impatient_router.fleet.ready)
    call = impatient_router.generation.GenerateMany(timeout=20)
    await call.write(generate("a"))
    (item,) = (await call.read()).items
    assert item.error.code == grpc.StatusCode.UNAVAILABLE.value[0] and "no replica" in item.error.message
    assert await ended(call)


async def test_a_client_that_goes_away_ends_its_requests(router: ScriptedFleet) -> None:
    """On all replicas."""
    call, where = await opened(router, "a", "b", "c")
    call.cancel()
    for _, stream in where.values():
        await until(stream.closed.is_set)
    await until(lambda: all(member.inflight == 0 for member in router.fleet.members))


async def test_a_client_that_does_not_read_holds_up_its_own_requests_only(router: ScriptedFleet) -> None:
    """And the router keeps a bounded part of what comes for it."""
    call, where = await opened(router, "a")
    _, stream = where["a"]
    # 32 KiB a message: ten times what connections, their windows and the router hold.
    count = 300
    stream.put(tokens([1], prompt=3))
    ids = list(range(16_000))
    for index in range(count):
        stream.put(tokens(ids, 1 + len(ids) * index))
    left = count
    while True:  # until nothing more is taken for a second
        await asyncio.sleep(1.0)
        if stream.updates.qsize() == left:
            break
        left = stream.updates.qsize()
    assert left > 0
    other, streams = await opened(router, "b")
    streams["b"][1].put(tokens([9], prompt=3, finish=FinishReason.EOS))
    assert (await other.read()).items[0].request_id == "b"
    other.cancel()
    call.cancel()
    await until(stream.closed.is_set)


async def test_a_call_to_a_replica_ends_when_it_has_nothing_to_carry(
    router: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a replica that shuts down need not wait for it. Its slots are given to the next one."""
    monkeypatch.setattr(leg, "IDLE_S", 0.05)
    call, where = await opened(router, "a")
    where["a"][1].put(tokens([9], prompt=3, finish=FinishReason.EOS))
    await call.read()
    upstream = router.fleet.upstreams[router.links[where["a"][0]].address]
    await until(lambda: not upstream.calls)
    await call.write(generate("b"))
    _, stream = await router.running("b")
    stream.put(tokens([1], prompt=3))
    assert list((await call.read()).items[0].slots) == [0]
    stream.put(tokens([9], 1, finish=FinishReason.EOS))
    await call.read()
    assert await ended(call)


async def test_requests_without_ids_get_one(router: ScriptedFleet) -> None:
    """The same on every replica that they are sent to."""
    call = router.generation.GenerateMany(timeout=20)
    await call.write(generate(""))
    await until(lambda: sum(router.num_submitted) == 1)
    (request,) = [each for daemon in router.daemons for each in daemon.engine.requests]
    _, stream = await router.running(request.request_id)
    stream.put(tokens([9], prompt=3, finish=FinishReason.EOS))
    assert (await call.read()).items[0].request_id == request.request_id != ""
    assert await ended(call)


async def answer(router: ScriptedFleet, count: int) -> None:
    """Answers so many requests in three steps, with tokens that follow the first one of the prompt."""
    seen: set[ScriptedStream] = set()
    feeding = []
    while len(seen) < count:
        for daemon in router.daemons:
            for stream, request in zip(daemon.engine.streams, daemon.engine.requests, strict=False):
                if stream.waiting.is_set() and not stream.is_finished and stream not in seen:
                    seen.add(stream)
                    feeding.append(asyncio.create_task(feed(stream, request.prompt.ids[0])))  # type: ignore[union-attr]
        await asyncio.sleep(0.002)
    await asyncio.gather(*feeding)


async def feed(stream: ScriptedStream, first: int) -> None:
    """One update at a time: an engine's stream merges what was not taken."""
    for update in (
        tokens([first], prompt=1),
        tokens([first + 1, first + 2], 1),
        tokens([first + 3], 3, finish=FinishReason.LENGTH),
    ):
        stream.put(update)
        await until(stream.updates.empty)


async def test_our_client_works_unchanged_against_three_replicas() -> None:
    """Its streams in columns, and its results in the order of the prompts."""
    prompts = [[10 * number] for number in range(30)]
    async with scripted_fleet() as router, AsyncClient(router.address) as client:
        answering = asyncio.create_task(answer(router, 30))
        generations = await client.generate_many(prompts, stream_interval=1, text=False, timeout_s=20)
        await answering
        assert [list(each.token_ids) for each in generations] == [[p, p + 1, p + 2, p + 3] for (p,) in prompts]
        assert min(router.num_submitted) > 5

        answering = asyncio.create_task(answer(router, 30))
        completed = [each async for each in client.generate_as_completed(prompts, timeout_s=20)]
        await answering
        assert sorted(position for position, _ in completed) == list(range(30))
        assert all(generation.error is None for _, generation in completed)

        answering = asyncio.create_task(answer(router, 1))
        assert (await client.generate([7], text=False, timeout_s=20)).token_ids == [7, 8, 9, 10]
        await answering


async def test_our_client_keeps_what_it_has_when_a_replica_dies() -> None:
    """The others' answers are whole."""
    async with scripted_fleet() as router, AsyncClient(router.address) as client:
        prompts = [[10 * number] for number in range(9)]
        completed = client.generate_as_completed(prompts, stream_interval=1)
        first = asyncio.create_task(anext(completed))
        await until(lambda: router.num_submitted == [3, 3, 3])
        begun, ended = (each.prompt.ids[0] for each in router.daemons[1].engine.requests[:2])  # type: ignore[union-attr]
        victims = router.daemons[1].engine.streams
        victims[0].put(tokens([begun], prompt=1))
        victims[1].put(tokens([ended + each for each in range(4)], prompt=1, finish=FinishReason.EOS))
        generations = dict([await first])  # after the first token of the other one, on the same stream
        router.links[1].kill()
        router.daemons[1].engine.streams.clear()
        await answer(router, 7)
        async with asyncio.timeout(STEP_S):
            generations |= {position: generation async for position, generation in completed}
        for position, (prompt,) in enumerate(prompts):
            generation = generations[position]
            if prompt == begun:
                assert isinstance(generation.error, ReplicaLostError) and list(generation.token_ids) == [begun]
            else:
                assert generation.error is None and len(generation.token_ids) == 4
