"""New tokens in columns, against the same output as items; and what a daemon or a client may not say in columns."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.client import AsyncClient
from genserve.client.generation.many import RowsDelta, Sequences
from genserve.client.generation.results import Delta, Generation, Logprobs
from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.errors import EngineDeadError, GenserveError
from genserve.settings.config import ServeConfig
from genserve.v1 import generation_pb2, types_pb2
from genserve.wire.literals import FIRST_SLOT_KEY
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, ScriptedStream, field_of, reason_of, serving, update

Request = generation_pb2.GenerateManyRequest
Response = generation_pb2.GenerateManyResponse
COLUMNS = generation_pb2.GENERATE_MANY_FORM_COLUMNS


@dataclass(frozen=True)
class Asked:
    """What a request asked for, the version of its adapter, and the new tokens of its sequences in each step, under
    which versions: step -> (index, version of each token)."""

    n: int
    lora_version: int
    text: bool
    token_ids: bool
    width: int | None
    steps: list[dict[int, list[int]]]
    fails: bool


versions = st.lists(st.sampled_from([0, 3, 7]), min_size=1, max_size=3)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Any request; every sequence gains something in some steps."""
    n = draw(st.integers(1, 3))
    steps = draw(st.lists(st.dictionaries(st.integers(0, n - 1), versions), min_size=1, max_size=5))
    lora_version, width = draw(st.sampled_from([0, 3, 4])), draw(st.sampled_from([None, 0, 2]))
    return Asked(n, lora_version, draw(st.booleans()), draw(st.booleans()), width, steps, draw(st.booleans()))


def updates(request: Asked) -> list[GenerationUpdate | BaseException | None]:
    """What the engine's stream gives in each step; in the last step everything ends."""
    counts: dict[int, int] = defaultdict(int)
    made: list[GenerationUpdate | BaseException | None] = []
    for number, step in enumerate(request.steps):
        deltas = [delta(request, index, counts, each) for index, each in step.items()]
        prompt = PromptInfo(5, 1, None, None) if not any(made) else None
        made.append(GenerationUpdate(prompt, deltas, None) if deltas else None)
        if number == len(request.steps) - 1:
            ends = [delta(request, index, counts, [7], ends=True) for index in range(request.n)]
            last = GenerationUpdate(
                PromptInfo(5, 1, None, None) if not any(made) else None, ends, Usage(5, 1, sum(counts.values()))
            )
            made.append(EngineDeadError("gone") if request.fails else last)
    return made


def delta(
    request: Asked, index: int, counts: dict[int, int], each: Sequence[int], *, ends: bool = False
) -> SequenceDelta:
    """New tokens, each sampled under one of these versions in turn. Their ids and log-probabilities tell them apart."""
    start = counts[index]
    end = counts[index] = start + len(each)
    lora_version = request.lora_version
    spans = [WeightSpan(version, start + i, start + i + 1, lora_version) for i, version in enumerate(each)]
    joined = [WeightSpan(each[0], start, end, lora_version)] if len(set(each)) == 1 else spans
    positions = range(100 * index + start, 100 * index + end)
    logprobs = None
    if request.width is not None:
        entries = [100 * position + column for position in positions for column in range(request.width)]
        logprobs = LogprobColumns(
            [-float(position) for position in positions],
            [position + 1 for position in positions],
            request.width,
            entries,
            [-float(entry) for entry in entries],
        )
    return SequenceDelta(
        index,
        list(positions) if request.token_ids else (),
        f"<{start}:{end}>" if request.text else "",
        logprobs,
        joined,
        Finish(FinishReason.LENGTH, None, end, joined, None) if ends else None,
    )


async def fed(daemon: Daemon, all_updates: list[list[GenerationUpdate | BaseException | None]], first: int) -> None:
    """Gives the updates to the engine's streams, one step at a time: each is taken before the next one is there."""
    streams: list[ScriptedStream] = [await daemon.stream(first + i) for i in range(len(all_updates))]
    for number in range(max(map(len, all_updates))):
        for stream, each in zip(streams, all_updates, strict=True):
            if number < len(each) and (following := each[number]) is not None:
                stream.put(following)
        while not all(stream.updates.empty() for stream in streams):
            await asyncio.sleep(0)


Told = dict[str, list[generation_pb2.GenerateResponse | str]]
"""The deltas of each request, in their order, and its error."""


async def as_items(daemon: Daemon, requests: list[Asked], first: int) -> Told:
    """What a client is told that knows no columns."""
    call = daemon.generation.GenerateMany(timeout=30)
    for number, request in enumerate(requests):
        sampling = generation_pb2.Sampling(n=request.n)
        await call.write(
            Request(generate=generation_pb2.GenerateRequest(request_id=str(number), text="x", sampling=sampling))
        )
    feeding = asyncio.create_task(fed(daemon, [updates(request) for request in requests], first))
    await call.done_writing()
    told: Told = defaultdict(list)
    async for response in call:
        assert not response.columns and not any(item.slots for item in response.items)
        for item in response.items:
            told[item.request_id].append(item.error.message if item.HasField("error") else item.response)
    await feeding
    return told


async def as_columns(daemon: Daemon, requests: list[Asked], first: int) -> tuple[Told, int]:
    """What our client makes of columns, and how many deltas were rows."""
    told: Told = defaultdict(list)
    num_rows = 0
    async with AsyncClient(daemon.address) as client, client.stream_many() as many:
        for number, request in enumerate(requests):
            await many.submit("x", request_id=str(number), n=request.n)
        feeding = asyncio.create_task(fed(daemon, [updates(request) for request in requests], first))
        await many.done()
        async for item in many:
            num_rows += isinstance(item.delta, RowsDelta)
            told[item.request_id].append(item.error.message if item.error else item.delta.message)  # type: ignore[union-attr]
        await feeding
    return told, num_rows


def single_version(step: dict[int, list[int]]) -> bool:
    """Whether all tokens of a step have the same version."""
    return len({version for each in step.values() for version in each}) == 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(asked(), min_size=1, max_size=4))
def test_columns_say_exactly_what_items_say(requests: list[Asked]) -> None:
    """The same deltas, spans, log-probabilities, ends and errors of every request, in the same order; and what can be
    rows is rows."""

    async def compare() -> None:
        async with serving(ServeConfig(port=0)) as daemon:
            expected = await as_items(daemon, requests, 0)
            told, num_rows = await as_columns(daemon, requests, len(requests))
        assert told == expected
        later = [[step for step in request.steps if step][1:] for request in requests]
        assert num_rows == sum(single_version(step) for steps in later for step in steps)

    asyncio.run(compare())


async def test_a_number_is_another_request_s_only_in_a_later_message(daemon: Daemon) -> None:
    """The smallest free number is taken, so that they stay small."""
    call = daemon.generation.GenerateMany(timeout=30)

    async def begin(*names: str) -> list[ScriptedStream]:
        before = len(daemon.engine.streams)
        for name in names:
            generate = generation_pb2.GenerateRequest(request_id=name, text="x")
            await call.write(Request(generate=generate, form=COLUMNS))
        return [await daemon.stream(before + i) for i in range(len(names))]

    def first(token: int = 1) -> GenerationUpdate:
        token_delta = SequenceDelta(0, [token], "", None, [WeightSpan(0, 0, 1)], None)
        return GenerationUpdate(PromptInfo(1, 0, None, None), [token_delta], None)

    def last() -> GenerationUpdate:
        return GenerationUpdate(None, [], Usage(1, 0, 1))

    one, two = await begin("a", "b")
    for stream in (one, two):
        stream.put(first())
    assert [list(item.slots) for item in (await call.read()).items] == [[0], [1]]
    three, four = await begin("c", "d")
    one.put(last())
    three.put(first())
    assert [list(item.slots) for item in (await call.read()).items] == [[], [2]]
    four.put(first())
    assert [list(item.slots) for item in (await call.read()).items] == [[0]]
    call.cancel()


async def test_the_tokens_of_a_step_are_one_row_each(daemon: Daemon) -> None:
    """Five bytes for a token, of an id of two bytes; an item has ten times as many."""
    call, num_requests = daemon.generation.GenerateMany(timeout=30), 100
    for number in range(num_requests):
        generate = generation_pb2.GenerateRequest(request_id=f"{number:032}", text="x")
        await call.write(Request(generate=generate, form=COLUMNS))
    streams = [await daemon.stream(number) for number in range(num_requests)]

    def token(position: int) -> GenerationUpdate:
        one = SequenceDelta(0, [1000 + position], "", None, [WeightSpan(4, position, position + 1)], None)
        return GenerationUpdate(None if position else PromptInfo(1, 0, None, None), [one], None)

    for position in range(3):
        for stream in streams:
            stream.put(token(position))
        response = await call.read()
    assert not response.items
    (columns,) = response.columns
    assert list(columns.slots) == list(range(num_requests)) and list(columns.token_ids) == [1002] * num_requests
    assert (columns.weight_version, list(columns.num_tokens), list(columns.texts)) == (4, [], [])
    assert response.ByteSize() <= 5 * num_requests
    call.cancel()


@pytest.mark.parametrize("form", [3, 99, -1, 2**31 - 1])
async def test_a_form_that_nobody_knows_is_refused(daemon: Daemon, form: Any) -> None:
    """By an error of the request that asked for it; another one goes on."""
    call = daemon.generation.GenerateMany(timeout=30)
    await call.write(Request(generate=generation_pb2.GenerateRequest(request_id="a", text="x"), form=form))
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert "form" in item.error.message and str(form) in item.error.message
    await call.write(Request(generate=generation_pb2.GenerateRequest(request_id="b", text="x"), form=COLUMNS))
    await daemon.stream()
    assert [request.request_id for request in daemon.engine.requests] == ["b"]
    call.cancel()


async def test_forms_may_be_mixed_in_a_stream(daemon: Daemon) -> None:
    """Each request says its own."""
    call = daemon.generation.GenerateMany(timeout=30)
    for name, form in (("a", COLUMNS), ("b", generation_pb2.GENERATE_MANY_FORM_ITEMS)):
        await call.write(Request(generate=generation_pb2.GenerateRequest(request_id=name, text="x"), form=form))
    streams = [await daemon.stream(0), await daemon.stream(1)]
    for position in range(2):
        for stream in streams:
            one = SequenceDelta(0, [position], "", None, [WeightSpan(0, position, position + 1)], None)
            stream.put(GenerationUpdate(None if position else PromptInfo(1, 0, None, None), [one], None))
        response = await call.read()
    assert [item.request_id for item in response.items] == ["b"]
    assert [list(columns.token_ids) for columns in response.columns] == [[1]]
    call.cancel()


def noted(*slots: int, request_id: str = "r", into: Sequences | None = None) -> Sequences:
    """A request with these slots, each of whose sequences has a token."""
    sequences = Sequences() if into is None else into
    outputs = [
        generation_pb2.SequenceDelta(index=i, token_ids=[1], weight_spans=[types_pb2.WeightSpan(end=1)])
        for i in range(len(slots))
    ]
    response = generation_pb2.GenerateResponse(outputs=outputs)
    sequences.note(generation_pb2.GenerateManyItem(request_id=request_id, response=response, slots=slots))
    return sequences


@pytest.mark.parametrize(
    "columns",
    [
        generation_pb2.TokenColumns(slots=[3], token_ids=[7]),
        generation_pb2.TokenColumns(slots=[0, 1], texts=["a"]),
        generation_pb2.TokenColumns(slots=[0, 1], num_tokens=[1, 1, 1]),
    ],
)
def test_rows_of_no_sequence_are_an_error(columns: generation_pb2.TokenColumns) -> None:
    """A client must not give tokens to another request than the one that they are of."""
    with refuses(GenserveError):
        list(noted(0, 1).deltas(columns))


def test_rows_are_what_an_item_adds_to_a_generation() -> None:
    """Sequences by index, with the positions that follow."""
    columns = generation_pb2.TokenColumns(
        slots=[5, 2], weight_version=3, lora_version=4, num_tokens=[2, 1], token_ids=[7, 8, 9]
    )
    ((request_id, told),) = noted(2, 5).deltas(columns)
    generation = Generation()
    generation.add(Delta(generation_pb2.GenerateResponse()))
    generation.add(told)
    assert request_id == "r" and not told.is_last and told.prompt is None and told.usage is None
    assert [sequence.token_ids for sequence in generation.sequences] == [[9], [7, 8]]
    assert [list(map(tuple, sequence.weight_spans)) for sequence in generation.sequences] == [
        [(3, 1, 2, 4)],
        [(3, 1, 3, 4)],
    ]
    assert "token_ids: 9" in repr(told) and "token_ids: 9" in repr(told.outputs[1])


def test_rows_of_several_requests_are_a_delta_each() -> None:
    """Each with its own text and log-probabilities."""
    sequences = noted(0, request_id="a")
    noted(1, 2, request_id="b", into=sequences)
    logprobs = types_pb2.Logprobs(
        sampled=[-1, -2, -3, -4], ranks=[1, 2, 3, 4], width=1, token_ids=[5, 6, 7, 8], values=[-5, -6, -7, -8]
    )
    columns = generation_pb2.TokenColumns(
        slots=[1, 2, 0], num_tokens=[1, 2, 1], token_ids=[10, 11, 12, 13], texts=["x", "y", "z"], logprobs=logprobs
    )
    (b, b_delta), (a, a_delta) = sequences.deltas(columns)
    assert (a, b, a_delta.text, b_delta.text) == ("a", "b", "z", "x")
    assert (a_delta.request_id, a_delta.outputs[0].finish) == ("", None)
    assert [output.token_ids for output in b_delta.outputs] == [[10], [11, 12]]
    assert [output.logprobs for output in [*b_delta.outputs, *a_delta.outputs]] == [
        Logprobs([-1], [1], 1, [5], [-5]),
        Logprobs([-2, -3], [2, 3], 1, [6, 7], [-6, -7]),
        Logprobs([-4], [4], 1, [8], [-8]),
    ]
    empty = generation_pb2.TokenColumns()
    assert list(sequences.deltas(empty)) == []


async def test_a_router_says_where_slots_begin(daemon: Daemon) -> None:
    """Refused if it is no slot."""
    request = Request(generate=generation_pb2.GenerateRequest(request_id="a", text="x"), form=COLUMNS)
    call = daemon.generation.GenerateMany(timeout=30, metadata=((FIRST_SLOT_KEY, "4000000000"),))
    await call.write(request)
    (await daemon.stream(0)).put(update(1, first=True))
    assert list((await call.read()).items[0].slots) == [4_000_000_000]
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await daemon.generation.GenerateMany(timeout=30, metadata=((FIRST_SLOT_KEY, "-1"),)).read()
    assert (reason_of(raised.value), field_of(raised.value)) == ("INVALID_FIELD", FIRST_SLOT_KEY)
