"""Converts updates of a generation to GenerateResponse. The hot path: one message per update, columns copied whole."""

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
)
from genserve.v1 import generation_pb2, types_pb2

_REASONS = {reason: generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def to_response(
    update: GenerationUpdate, request_id: str, into: generation_pb2.GenerateResponse | None = None
) -> generation_pb2.GenerateResponse:
    """The message for one update; the first one of a request contains `request_id`. `into`: an empty message, a part of
    another one."""
    response = generation_pb2.GenerateResponse() if into is None else into
    # Fields are set one by one: arguments of a message's constructor cost twice as much.
    for delta in update.outputs:
        message = response.outputs.add()
        if delta.index:
            message.index = delta.index
        if delta.text:
            message.text = delta.text
        message.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            _fill_logprobs(message.logprobs, delta.logprobs)
        for version, start, end, lora_version in delta.weight_spans:
            span = message.weight_spans.add()
            span.version = version
            span.start = start
            span.end = end
            if lora_version:
                span.lora_version = lora_version
        if delta.finish is not None:
            _fill_finish(message.finish, delta.finish)
    if update.prompt is not None:
        response.request_id = request_id
        _fill_prompt(response.prompt, update.prompt)
    usage = update.usage
    if usage is not None:
        response.usage.num_prompt_tokens = usage.num_prompt_tokens
        response.usage.num_cached_tokens = usage.num_cached_tokens
        response.usage.num_output_tokens = usage.num_output_tokens
        response.usage.SetInParent()
    return response


def _fill_logprobs(message: types_pb2.Logprobs, columns: LogprobColumns) -> None:
    message.width = columns.width
    message.sampled.extend(columns.sampled)
    message.ranks.extend(columns.ranks)
    message.token_ids.extend(columns.token_ids)
    message.values.extend(columns.values)


def _fill_prompt(message: generation_pb2.Prompt, prompt: PromptInfo) -> None:
    message.num_tokens = prompt.num_tokens
    message.num_cached_tokens = prompt.num_cached_tokens
    if prompt.token_ids is not None:
        message.token_ids.extend(prompt.token_ids)
    if prompt.logprobs is not None:
        message.logprobs.SetInParent()
        _fill_logprobs(message.logprobs, prompt.logprobs)


def _fill_finish(message: generation_pb2.Finish, finish: Finish) -> None:
    message.reason = _REASONS[finish.reason]
    if isinstance(finish.stop, str):
        message.stop_string = finish.stop
    elif finish.stop is not None:
        message.stop_token_id = finish.stop
    message.num_tokens = finish.num_tokens
    for span in finish.weight_spans:
        message.weight_spans.add(**span._asdict())
    if finish.cumulative_logprob is not None:
        message.cumulative_logprob = finish.cumulative_logprob
