"""Answers that are too large for one message: 30 sequences of 1,300 tokens, each with 20 alternatives."""

import grpc.aio

from genserve.client.generation.many import Sequences
from genserve.client.generation.results import Delta, Generation
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
from genserve.v1 import generation_pb2
from tests.support.patience import until
from tests.support.scripted_daemon import ScriptedStream, update

Request = generation_pb2.GenerateManyRequest
ITEMS, COLUMNS = generation_pb2.GENERATE_MANY_FORM_ITEMS, generation_pb2.GENERATE_MANY_FORM_COLUMNS
NUM_SEQUENCES, NUM_TOKENS, WIDTH = 30, 1300, 20


def large(num_sequences: int = NUM_SEQUENCES, *, last: bool = True, start: int = 0) -> GenerationUpdate:
    """All that sequences have gained while nobody looked: 160 KB each."""
    deltas = []
    for index in range(num_sequences):
        end = start + NUM_TOKENS
        spans = (
            [WeightSpan(1, start, end - 300, 5), WeightSpan(2, end - 300, end, 5)]
            if last
            else [WeightSpan(1, start, end, 5)]
        )
        logprobs = LogprobColumns(
            [-1.0 * i for i in range(NUM_TOKENS)],
            [i % 50 + 1 for i in range(NUM_TOKENS)],
            WIDTH,
            [100_000 + i for i in range(NUM_TOKENS * WIDTH)],
            [-0.25 * i for i in range(NUM_TOKENS * WIDTH)],
        )
        finish = (
            Finish(FinishReason.LENGTH, None, end, [WeightSpan(1, 0, end - 300, 5), spans[-1]], -3.0) if last else None
        )
        token_ids = [100_000 + index + i for i in range(NUM_TOKENS)]
        deltas.append(SequenceDelta(index, token_ids, "word " * 1000, logprobs, spans, finish))
    usage = Usage(2, 0, num_sequences * (start + NUM_TOKENS)) if last else None
    return GenerationUpdate(None if start else PromptInfo(2, 0, None, None), deltas, usage)


def check(generation: Generation, num_tokens: int = NUM_TOKENS) -> None:
    """Every sequence is whole."""
    assert generation.usage is not None and generation.usage.num_output_tokens == NUM_SEQUENCES * num_tokens
    assert len(generation.sequences) == NUM_SEQUENCES
    for index, sequence in enumerate(generation.sequences):
        assert sequence.token_ids[-NUM_TOKENS:] == [100_000 + index + i for i in range(NUM_TOKENS)]
        assert sequence.text == "word " * 1000 * (num_tokens // NUM_TOKENS)
        assert sequence.logprobs is not None and len(sequence.logprobs.sampled) == num_tokens
        assert sequence.logprobs.values[-2:] == [-0.25 * (NUM_TOKENS * WIDTH - 2), -0.25 * (NUM_TOKENS * WIDTH - 1)]
        expected = [(1, 0, num_tokens - 300, 5), (2, num_tokens - 300, num_tokens, 5)]
        assert list(map(tuple, sequence.weight_spans)) == expected


async def read_all(
    call: "grpc.aio.StreamStreamCall[Request, generation_pb2.GenerateManyResponse]",
) -> tuple[dict[str, Generation], list[str]]:
    """The generations of a stream, and the ids in the order in which they ended."""
    generations: dict[str, Generation] = {}
    sequences, ended = Sequences(), []
    async for response in call:
        for columns in response.columns:
            for request_id, told in sequences.deltas(columns):
                generations[request_id].add(told)
        for item in response.items:
            assert item.HasField("response")
            generations.setdefault(item.request_id, Generation()).add(Delta(item.response))
            sequences.note(item)
            ended += [item.request_id] if item.response.HasField("usage") else []
    return generations, ended


async def begun(call: "grpc.aio.StreamStreamCall", form: "generation_pb2.GenerateManyForm.ValueType") -> None:  # type: ignore[type-arg]
    """A request with many sequences, and a small one beside it."""
    for request_id, num_sequences in (("large", NUM_SEQUENCES), ("small", 1)):
        sampling = generation_pb2.Sampling(n=num_sequences)
        request = generation_pb2.GenerateRequest(request_id=request_id, text="hi", sampling=sampling)
        await call.write(Request(generate=request, form=form))
    await call.done_writing()


async def gain(streams: list[ScriptedStream]) -> None:
    """A large update, and the end while that is still being told."""
    streams[0].put(large(last=False))
    streams[1].put(update(7, first=True, last=True))
    await until(streams[0].updates.empty)
    streams[0].put(large(start=NUM_TOKENS))
