"""What is kept of vLLM's outputs until it is read, against what vLLM itself makes of the same outputs."""

import asyncio
import gc
import sys
import time
import weakref
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from genserve.client.generation.results import Logprobs
from genserve.engine.generation import (
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    LogprobColumns,
    Output,
    Sampling,
    Stop,
    TokenPrompt,
    WeightSpan,
)
from genserve.engine.vllm.requests.outputs import LeanOutputs, SequenceState, Unread
from genserve.engine.vllm.requests.sampling import sampling_fields
from genserve.engine.vllm.requests.stream import VllmStream
from genserve.engine.vllm.requests.weight_spans import version_of
from genserve.errors import GenserveError
from tests.support.models import tiny_qwen3

VOCABULARY = 200
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path_factory.mktemp("tiny")))


class Step(NamedTuple):
    """What the engine says of one sequence."""

    index: int
    token_ids: list[int]
    version: str
    finish: VllmFinishReason | None = None
    stop: int | None = None


def logprobs_of(token_ids: list[int], width: int) -> LogprobsLists:
    """As many alternatives as some request of the step asked for; the token itself is the first entry."""
    rows = [[token, *((token + i) % VOCABULARY for i in range(width))] for token in token_ids]
    values = np.array([[-float(entry) - i / 4 for i, entry in enumerate(row)] for row in rows], np.float32)
    return LogprobsLists(np.array(rows, np.int32), values, np.array([1 + t % 9 for t in token_ids], np.int32))


class Processing:
    """vLLM's processing of the outputs of one request, with our states or as it is."""

    def __init__(self, tokenizer: Any, request: GenerationRequest, *, lean: bool) -> None:
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        kind = RequestOutputKind.FINAL_ONLY if request.output.stream_interval == 0 else RequestOutputKind.DELTA
        fields = sampling_fields(request, set(SamplingParams.__struct_fields__))
        params = SamplingParams(output_kind=kind, flat_logprobs=True, **fields)
        core = EngineCoreRequest(
            "r-internal", PROMPT, None, params, None, time.time(), None, None, None, external_req_id=request.request_id
        )
        self.collector = RequestOutputCollector(kind, core.request_id)
        self.ids = [core.request_id]
        self.ended: list[str] = []
        outputs = LeanOutputs(self.processor) if lean else None
        unread = outputs.expect(request) if outputs is not None else None
        if params.n == 1:
            self.processor.add_request(core, None, None, 0, self.collector)
        else:
            parent = ParentRequest(core)
            self.ids = []
            for index in range(params.n):
                child = copy(core)
                child.request_id, child.sampling_params = parent.get_child_info(index)
                self.ids.append(child.request_id)
                self.processor.add_request(child, None, parent, index, self.collector)
        if outputs is not None and unread is not None:
            outputs.forget(request.request_id)
            self.unread = unread
            self.stream = VllmStream(request, "r-internal", unread, self._abort, self.ended.append, translated)

    async def _abort(self, stream: VllmStream) -> None:
        self.processor.abort_requests([stream.internal_id], internal=True)

    def step(self, *steps: Step, width: int | None = None) -> None:
        """One step of the engine, whose rows of log-probabilities are so wide; sequences that have ended are not
        there any more."""
        for each in steps:
            output = EngineCoreOutput(
                self.ids[each.index],
                list(each.token_ids),
                new_logprobs=logprobs_of(each.token_ids, width) if each.token_ids and width is not None else None,
                finish_reason=each.finish,
                stop_reason=each.stop,
            )
            self.processor.process_outputs([output], time.monotonic(), None, weight_version=each.version)


def translated(error: Exception) -> GenserveError:
    return GenserveError(f"translated: {error}")


def summed(updates: list[GenerationUpdate], n: int) -> list[dict[str, Any]]:
    """What each sequence has come to."""
    sequences: list[dict[str, Any]] = [
        {"text": "", "ids": [], "spans": [], "logprobs": Logprobs(), "end": None} for _ in range(n)
    ]
    for update in updates:
        assert [delta.index for delta in update.outputs] == sorted({delta.index for delta in update.outputs})
        for delta in update.outputs:
            sequence = sequences[delta.index]
            assert sequence["end"] is None
            sequence["text"] += delta.text
            sequence["ids"] += delta.token_ids
            for span in delta.weight_spans:
                sequence["spans"] += [span.version] * (span.end - span.start)
            if delta.logprobs is not None:
                columns = delta.logprobs
                sequence["logprobs"].extend(
                    Logprobs(columns.sampled, columns.ranks, columns.width, columns.token_ids, columns.values)
                )
            if delta.finish is not None:
                end = delta.finish
                covered = [span.version for span in end.weight_spans for _ in range(span.start, span.end)]
                assert covered == sequence["spans"] and end.num_tokens == len(covered)
                sequence["end"] = (end.reason, end.stop, end.num_tokens, end.cumulative_logprob)
    return sequences


REASONS = {"length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION, "abort": FinishReason.ABORTED}


def expected(outputs: list[RequestOutput], request: GenerationRequest) -> list[dict[str, Any]]:
    """The same of what vLLM makes of them."""
    wanted, width = request.output, request.output.logprobs
    sequences: list[dict[str, Any]] = [
        {"text": "", "ids": [], "spans": [], "logprobs": Logprobs(), "end": None}
        for _ in range(request.sampling.n or 1)
    ]
    for output in outputs:
        for completion in output.outputs:
            sequence = sequences[completion.index]
            sequence["text"] += completion.text if wanted.text else ""
            sequence["ids"] += completion.token_ids
            if width is not None and completion.logprobs:
                flat: Any = completion.logprobs
                rows = list(zip(flat.start_indices, flat.end_indices, strict=True))
                sequence["logprobs"].extend(
                    Logprobs(
                        [flat.logprobs[start] for start, _ in rows],
                        [flat.ranks[start] for start, _ in rows],
                        width,
                        [i for start, end in rows for i in flat.token_ids[start + 1 : end]],
                        [value for start, end in rows for value in flat.logprobs[start + 1 : end]],
                    )
                )
            if completion.finish_reason is not None:
                stop = completion.stop_reason
                reason = REASONS.get(completion.finish_reason)
                if reason is None:
                    by_token = FinishReason.STOP_TOKEN if stop in request.stop.token_ids else FinishReason.EOS
                    reason = FinishReason.STOP_STRING if isinstance(stop, str) else by_token
                told = stop if reason in (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN) else None
                cumulative = completion.cumulative_logprob if width is not None else None
                sequence["end"] = (reason, told, len(sequence["ids"]), cumulative)
                sequence["spans"] = [
                    version_of(span.version)
                    for span in completion.weight_versions or ()
                    for _ in range(span.start, span.end)
                ]
    return sequences


@st.composite
def scripts(draw: st.DrawFn) -> tuple[GenerationRequest, list[tuple[Step, bool]], int | None]:
    """A request, what the engine says of its sequences, after which steps it is read, and the width of the rows."""
    n = draw(st.integers(1, 3))
    width = draw(st.sampled_from([None, 0, 2]))
    output = Output(
        text=draw(st.booleans()), logprobs=width, stream_interval=draw(st.sampled_from([0, 1, 1, 3])), token_ids=True
    )
    stops = draw(st.lists(st.text("abcdef t", min_size=1, max_size=3), max_size=2))
    stop = Stop(strings=stops, token_ids=[9], include_stop=draw(st.booleans()))
    request = GenerationRequest("r", TokenPrompt(PROMPT), Sampling(n=n), stop, output)
    steps = []
    labels = ["default", "3", "4"]
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3)
    for _ in range(draw(st.integers(1, 8))):
        if len(labels) > 1 and draw(st.booleans()):
            labels.pop(0)
        steps += [Step(index, draw(tokens), labels[0]) for index in range(n) if draw(st.booleans())]
    ends = st.sampled_from([(VllmFinishReason.LENGTH, None), (VllmFinishReason.STOP, None), (VllmFinishReason.STOP, 9)])
    steps += [Step(index, draw(tokens), labels[0], *draw(ends)) for index in draw(st.permutations(range(n)))]
    return (
        request,
        [(step, draw(st.booleans())) for step in steps],
        None if width is None else draw(st.integers(width, 3)),
    )


@settings(max_examples=300, deadline=None)
@given(script=scripts())
def test_what_is_read_is_what_vllm_would_have_made(
    tokenizer: Any, script: tuple[GenerationRequest, list[tuple[Step, bool]], int | None]
) -> None:
    """However late it is read: text, tokens, log-probabilities, versions and ends. vLLM's own outputs are read after
    every step here."""
    request, steps, width = script

    async def read() -> tuple[list[GenerationUpdate], list[RequestOutput]]:
        ours, theirs = Processing(tokenizer, request, lean=True), Processing(tokenizer, request, lean=False)
        updates: list[GenerationUpdate] = []
        outputs: list[RequestOutput] = []
        for step, is_read in steps:
            ours.step(step, width=width)
            theirs.step(step, width=width)
            if (output := theirs.collector.get_nowait()) is not None:
                assert isinstance(output, RequestOutput)
                outputs.append(copy(output))
            if is_read and (update := ours.stream.take()) is not None:
                updates.append(update)
        if (update := ours.stream.take()) is not None:
            updates.append(update)
        assert ours.stream.is_finished and ours.stream.take() is None
        assert ours.processor.request_states == {} and not ours.processor.parent_requests
        return updates, outputs

    updates, outputs = asyncio.run(read())
    assert summed(updates, request.sampling.n or 1) == expected(outputs, request)
    assert updates[0].prompt is not None and updates[0].prompt.num_tokens == len(PROMPT)
    assert all(update.prompt is None for update in updates[1:])
    assert updates[-1].usage is not None and all(update.usage is None for update in updates[:-1])
    assert updates[-1].usage.num_output_tokens == sum(len(each["ids"]) for each in expected(outputs, request))
    if request.output.stream_interval == 0:
        assert len(updates) == 1


def request(n: int = 1, interval: int = 1, **wanted: Any) -> GenerationRequest:
    """For tokens alone."""
    return GenerationRequest(
        "r", TokenPrompt(PROMPT), Sampling(n=n), Stop(), Output(stream_interval=interval, **{"text": False, **wanted})
    )


async def test_who_is_called_is_called_once_until_it_reads(tokenizer: Any) -> None:
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
    with pytest.raises(GenserveError, match="ended request r with an error"):
        processing.stream.take()
    assert processing.stream.is_finished


async def test_the_death_of_the_engine_ends_the_stream(tokenizer: Any) -> None:
    """As the error that clients know it by."""
    processing, calls = Processing(tokenizer, request(), lean=True), []
    processing.stream.call_when_ready(lambda: calls.append(1))
    processing.processor.propagate_error(RuntimeError("dead"))
    assert calls == [1]
    with pytest.raises(GenserveError, match="translated: dead"):
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


async def test_a_request_that_is_not_expected_stays_vllms(tokenizer: Any) -> None:
    """Its outputs go where vLLM puts them."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    outputs = LeanOutputs(processor)
    unread = outputs.expect(request())
    outputs.forget("r")
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    core = EngineCoreRequest("i", PROMPT, None, params, None, 0.0, None, None, None, external_req_id="r")
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "i")
    processor.add_request(core, None, None, 0, collector)
    assert not isinstance(processor.request_states["i"], SequenceState)
    processor.process_outputs([EngineCoreOutput("i", [1])], 0.0, None)
    assert isinstance(collector.output, RequestOutput) and isinstance(unread, Unread) and not unread.is_ready


async def test_prompt_logprobs_are_columns_in_the_first_update(tokenizer: Any) -> None:
    """Chunks of a prompt follow each other; a prompt of one token has none."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

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
