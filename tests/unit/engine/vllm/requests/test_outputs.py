"""What is kept of vLLM's outputs until it is read, and for how long."""

import asyncio
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsTensors

from genserve.engine.generation import (
    FinishReason,
    GenerationRequest,
    LogprobColumns,
    Output,
    Sampling,
    Stop,
    TokenPrompt,
    WeightSpan,
)
from genserve.engine.vllm.requests.outputs import StreamedOutputs
from genserve.engine.vllm.requests.stream import StreamedSequence
from genserve.errors import GenserveError
from tests.support.refusals import refuses
from tests.unit.engine.vllm.requests.processing import PROMPT, VOCABULARY, Processing, Step


def request(n: int = 1, interval: int = 1, **wanted: Any) -> GenerationRequest:
    """For tokens alone."""
    return GenerationRequest(
        "r", TokenPrompt(PROMPT), Sampling(n=n), Stop(), Output(stream_interval=interval, **{"text": False, **wanted})
    )


async def test_listener_is_called_once_until_it_reads(tokenizer: Any) -> None:
    """Not for every token: then waking up would be all that a busy daemon does."""
    processing, calls = Processing(tokenizer, request(n=2), lean=True), []
    processing.stream.call_when_ready(lambda: calls.append(1))
    for _ in range(3):
        processing.step(Step(0, [1], "1"), Step(1, [2], "1"))
    assert len(calls) == 1
    update = processing.stream.take()
    assert update is not None and [delta.token_ids for delta in update.outputs] == [[1, 1, 1], [2, 2, 2]]
    processing.step(Step(1, [3], "1"))
    assert len(calls) == 2
    processing.stream.call_when_ready(lambda: calls.append(1))
    assert len(calls) == 3, "at once, because there is something"


async def test_a_final_message_is_told_when_the_last_sequence_ends(tokenizer: Any) -> None:
    """And nothing is there before."""
    processing, calls = Processing(tokenizer, request(n=2, interval=0), lean=True), []
    processing.stream.call_when_ready(lambda: calls.append(1))
    processing.step(Step(1, [1], "1"), Step(1, [2], "1", VllmFinishReason.LENGTH), Step(0, [3], "1"))
    assert (calls, processing.stream.take()) == ([], None)
    processing.step(Step(0, [4], "1", VllmFinishReason.LENGTH))
    assert calls == [1]
    update = processing.stream.take()
    assert update is not None and [delta.token_ids for delta in update.outputs] == [[3, 4], [1, 2]]


async def test_an_abort_keeps_the_tokens_so_far(tokenizer: Any) -> None:
    """Of all sequences."""
    processing, ready = Processing(tokenizer, request(n=2, interval=0), lean=True), asyncio.Event()
    processing.stream.call_when_ready(ready.set)
    processing.step(Step(0, [1], "1"), Step(1, [2, 3], "1"))
    processing.stream.end_soon(FinishReason.TIME_LIMIT)
    await ready.wait()
    update = processing.stream.take()
    assert update is not None and [delta.token_ids for delta in update.outputs] == [[1], [2, 3]]
    assert [delta.finish.reason for delta in update.outputs if delta.finish] == [FinishReason.TIME_LIMIT] * 2
    assert processing.ended == ["r"] and processing.stream.take() is None


@pytest.mark.parametrize("num_new", [0, 2])
async def test_an_error_of_the_engine_comes_after_the_tokens(tokenizer: Any, num_new: int) -> None:
    """Also where their ids were not asked for."""
    processing = Processing(tokenizer, request(token_ids=False), lean=True)
    processing.step(Step(0, [1], "1"))
    assert processing.stream.take() is not None
    calls: list[int] = []
    processing.stream.call_when_ready(lambda: calls.append(1))
    processing.step(Step(0, [7] * num_new, "1", VllmFinishReason.ERROR))
    if num_new:
        update = processing.stream.take()
        assert update is not None and update.usage is None
        assert (update.outputs[0].weight_spans, update.outputs[0].finish) == ([WeightSpan(1, 1, 3)], None)
        assert calls == [1, 1], "it is to be read again"
    with refuses(GenserveError, says="request r "):
        processing.stream.take()
    assert processing.stream.is_finished


async def test_the_death_of_the_engine_ends_the_stream(tokenizer: Any) -> None:
    """As the error that clients know it by."""
    processing, calls = Processing(tokenizer, request(n=2), lean=True), []
    processing.stream.call_when_ready(lambda: calls.append(1))
    processing.processor.propagate_error(RuntimeError("dead"))
    assert calls == [1]
    with refuses(GenserveError, says="translated: dead"):
        processing.stream.take()


async def test_log_probabilities_leave_when_they_are_read(tokenizer: Any) -> None:
    """A request of a million tokens keeps none of those that its client has."""
    processing = Processing(tokenizer, request(logprobs=2), lean=True)
    (state,) = processing.processor.request_states.values()
    for _ in range(10):
        processing.step(Step(0, [1] * 100, "1"), width=2)
        update = processing.stream.take()
        assert update is not None and update.outputs[0].logprobs is not None
        assert len(update.outputs[0].logprobs.sampled) == 100
        held = [value for value in gc.get_referents(state, state.logprobs_processor) if isinstance(value, list)]
        assert state.logprobs_processor.take() is None and max(map(len, held), default=0) <= 1
    assert state.logprobs_processor.cumulative_logprob == -1000.0


@pytest.mark.parametrize("interval", [0, 1])
async def test_text_that_was_set_aside_is_not_copied_for_every_token(tokenizer: Any, interval: int) -> None:
    """vLLM appends each token to all the text so far, which it copies: so little is left there."""
    processing = Processing(tokenizer, request(interval=interval, text=True), lean=True)
    (state,) = processing.processor.request_states.values()
    texts, longest = [], 0
    for number in range(3000):
        processing.step(Step(0, [40 + number % 50, 70, 80], "1"))
        longest = max(longest, len(state.detokenizer.output_text))
        if interval and (update := processing.stream.take()) is not None:
            texts.append(update.outputs[0].text)
    processing.step(Step(0, [1], "1", VllmFinishReason.LENGTH))
    update = processing.stream.take()
    assert update is not None
    text = "".join([*texts, update.outputs[0].text])
    ids = [i for number in range(3000) for i in (40 + number % 50, 70, 80)]
    assert text == tokenizer.decode([*ids, 1]) and len(text) > 9000
    assert longest < 5000


async def test_a_sequence_without_text_keeps_no_tokens_that_were_read(tokenizer: Any) -> None:
    """vLLM would keep them all, until the request ends."""
    processing = Processing(tokenizer, request(), lean=True)
    (state,) = processing.processor.request_states.values()
    for number in range(100):
        processing.step(Step(0, [number % VOCABULARY] * 100, "1"))
        processing.stream.take()
    assert state.detokenizer.num_output_tokens() == 10_000
    assert sys.getsizeof(state.detokenizer.token_ids if hasattr(state.detokenizer, "token_ids") else ()) < 1000


async def test_a_stream_that_is_given_up_is_freed_at_once(tokenizer: Any) -> None:
    """Not when the garbage collector comes by, with what nobody reads any more."""
    processing = Processing(tokenizer, request(), lean=True)
    gc.disable()
    try:
        processing.step(Step(0, [1], "1"))
        (state,) = processing.processor.request_states.values()
        freed = weakref.ref(state)
        del state
        await processing.stream.close()
        assert processing.processor.request_states == {}
        assert freed() is None
    finally:
        gc.enable()


async def test_a_request_without_a_stream_stays_vllms(tokenizer: Any) -> None:
    """Its outputs go where vLLM puts them."""
    processor = StreamedOutputs(tokenizer, log_stats=False)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    core = EngineCoreRequest("i", PROMPT, None, params, None, 0.0, None, None, None, external_req_id="r")
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "i")
    processor.add_request(core, None, None, 0, collector)
    assert not isinstance(processor.request_states["i"], StreamedSequence)
    processor.process_outputs([EngineCoreOutput("i", [1])], 0.0, None)
    assert isinstance(collector.output, RequestOutput)


async def test_prompt_logprobs_are_columns_in_the_first_update(tokenizer: Any) -> None:
    """Chunks of a prompt follow each other; a prompt of one token has none."""
    processing = Processing(tokenizer, request(prompt_logprobs=1), lean=True)
    tensors = LogprobsTensors(torch.tensor([[6, 1], [7, 2]]), torch.tensor([[-1.0, -0.5], [-2.0, -0.25]]),
                              torch.tensor([4, 1]))  # fmt: skip
    output = EngineCoreOutput("r-internal", [1], new_prompt_logprobs_tensors=tensors)
    processing.processor.process_outputs([output], 0.0, None, weight_version="1")
    update = processing.stream.take()
    assert update is not None and update.prompt is not None
    assert update.prompt.logprobs == LogprobColumns([-1.0, -2.0], [4, 1], 1, [1, 2], [-0.5, -0.25])
    without = Processing(tokenizer, request(prompt_logprobs=1), lean=True)
    without.step(Step(0, [1], "1"))
    update = without.stream.take()
    assert update is not None and update.prompt is not None
    assert update.prompt.logprobs == LogprobColumns([], [], 1, [], [])
