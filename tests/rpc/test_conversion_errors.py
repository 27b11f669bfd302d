"""Output of an engine that no message can have: it ends its own request, and no other of the stream."""

from dataclasses import replace

import grpc
import pytest

from genserve.client.generation.many import Sequences
from genserve.engine.generation import GenerationUpdate, LogprobColumns, PromptInfo, SequenceDelta, Usage, WeightSpan
from genserve.v1 import generation_pb2
from tests.support.patience import until
from tests.support.scripted_daemon import Daemon, ScriptedStream

Request = generation_pb2.GenerateManyRequest
FORMS = [generation_pb2.GENERATE_MANY_FORM_ITEMS, generation_pb2.GENERATE_MANY_FORM_COLUMNS]
NAMES = "abc"


def token(position: int, *, last: bool = False) -> GenerationUpdate:
    """One token, with a log-probability."""
    logprobs = LogprobColumns([-1.0], [1], 1, [position], [-2.0])
    delta = SequenceDelta(0, [position], f"<{position}>", logprobs, [WeightSpan(4, position, position + 1)], None)
    prompt = None if position else PromptInfo(2, 0, None, None)
    return GenerationUpdate(prompt, [delta], Usage(2, 0, position + 1) if last else None)


def wrong(position: int, **fields: object) -> GenerationUpdate:
    """The same with something that is no such value."""
    right = token(position)
    return replace(right, outputs=[replace(right.outputs[0], **fields)])


WRONG = {
    "a negative token": {"token_ids": [-1]},
    "no token": {"token_ids": [None]},
    "half a character": {"text": "\ud800"},
    "no text": {"text": None},
    "a rank that is none": {"logprobs": LogprobColumns([-1.0], [-1], 1, [0], [-2.0])},
    "alternatives that are none": {"logprobs": LogprobColumns([-1.0], [1], 1, [1 << 40], [-2.0])},
    "no log-probabilities": {"logprobs": LogprobColumns([-1.0], [1], 1, None, [-2.0])},  # type: ignore[arg-type]
    "a sequence that is none": {"index": 7},
    "a sequence of no number": {"index": "x"},
    "a span of no version": {"weight_spans": [WeightSpan(-1, 1, 2)]},
}

CASES = [
    pytest.param(form, fields, id=f"{name} as {form}")
    for name, fields in WRONG.items()
    for form in FORMS
    if (form, fields) != (FORMS[0], {"index": 7})  # an item may have any
]


@pytest.mark.parametrize(("form", "fields"), CASES)
async def test_what_no_message_can_have_ends_its_request_alone(
    daemon: Daemon, form: "generation_pb2.GenerateManyForm.ValueType", fields: dict[str, object]
) -> None:
    """INTERNAL for that one, which ends in the engine, too. The others lose nothing, in the same message or later."""
    call = daemon.generation.GenerateMany(timeout=30)
    for name in NAMES:
        await call.write(Request(generate=generation_pb2.GenerateRequest(request_id=name, text="x"), form=form))
    await call.done_writing()
    streams: list[ScriptedStream] = [await daemon.stream(index) for index in range(len(NAMES))]
    for stream in streams:
        stream.put(token(0))
    sequences, told, failed = Sequences(), dict[str, list[int]](), dict[str, int]()

    async def read() -> bool:
        response = await call.read()
        if response is grpc.aio.EOF:
            return False
        for columns in response.columns:
            for request_id, delta in sequences.deltas(columns):
                told.setdefault(request_id, []).extend(delta.outputs[0].token_ids)
        for item in response.items:
            if item.HasField("error"):
                failed[item.request_id] = item.error.code
            else:
                told.setdefault(item.request_id, []).extend(item.response.outputs[0].token_ids)
            sequences.note(item)
        return True

    assert await read()
    streams[0].put(token(1))
    streams[1].put(wrong(1, **fields))
    streams[2].put(token(1))
    while "b" not in failed:
        assert await read()
    for index in (0, 2):
        streams[index].put(token(2))
        streams[index].put(token(3, last=True))
    while await read():
        pass
    assert await call.code() is grpc.StatusCode.OK
    assert failed == {"b": grpc.StatusCode.INTERNAL.value[0]}
    assert told == {"a": [0, 1, 2, 3], "b": [0], "c": [0, 1, 2, 3]}
    await until(streams[1].closed.is_set)


async def test_a_request_of_several_wrong_sequences_fails_once(daemon: Daemon) -> None:
    """Each of them is a row of its own."""
    call = daemon.generation.GenerateMany(timeout=30)
    asked = generation_pb2.GenerateRequest(request_id="a", text="x", sampling=generation_pb2.Sampling(n=2))
    await call.write(Request(generate=asked, form=FORMS[1]))
    await call.done_writing()
    stream = await daemon.stream(0)
    for made in (token(0), wrong(1, token_ids=[-1])):
        both = [made.outputs[0], replace(made.outputs[0], index=1)]
        stream.put(replace(made, outputs=both))
        response = await call.read()
    assert [item.error.code for item in response.items] == [grpc.StatusCode.INTERNAL.value[0]]
    assert await call.read() is grpc.aio.EOF
