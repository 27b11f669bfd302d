"""What is kept of vLLM's outputs until it is read, against what vLLM itself makes of the same outputs."""

import asyncio
from copy import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmFinishReason

from genserve.client.generation.results import Logprobs
from genserve.engine.generation import (
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    Output,
    Sampling,
    Stop,
    TokenPrompt,
)
from genserve.engine.vllm.requests.weight_spans import version_of
from tests.unit.engine.vllm.requests.processing import PROMPT, VOCABULARY, Processing, Step


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


@pytest.mark.slow
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


# Why nothing of an answer has it. All else that vLLM's engine returns is told.
NOT_TOLD = {
    "pooling_output": "the daemon does not start with --runner pooling",
    "events": "they become vLLM's metrics",
    "prefill_stats": "they become PromptInfo's number of cached tokens, and vLLM's metrics",
    "spec_decode_metrics": "they become vLLM's metrics",
    "trace_headers": "they are for vLLM's spans",
    "kv_transfer_params": "no request can set its side of them: extra_args are the daemon's",
    "ec_transfer_params": "no request can set its side of them: extra_args are the daemon's",
    "routed_experts": "the daemon does not start with --enable-return-routed-experts",
    "new_sampling_mask": "the daemon does not start with --return-sampling-mask",
    "num_nans_in_logits": "VLLM_COMPUTE_NANS_IN_LOGITS, a variable for debugging vLLM, makes them a metric",
    "mm_cache_miss_hashes": "requests have no images",
    "prompt_token_id_logprobs": "engine_params.prompt_logprob_token_ids is refused",
}
TOLD = {
    *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "finish_reason", "stop_reason"),
}


def test_each_part_of_vllms_output_is_told_or_cannot_be_there() -> None:
    """A new vLLM's new part fails here: what is dropped in silence is missed by somebody."""
    assert {each.name for each in msgspec.structs.fields(EngineCoreOutput)} == TOLD | NOT_TOLD.keys()
