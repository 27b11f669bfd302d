"""Converts a request to the fields of vLLM's SamplingParams, and vLLM's errors to fields of the request. Pure: knows
the names, not the class."""

from dataclasses import fields
from typing import Any, Final

from genserve.engine.generation import GenerationRequest, Sampling
from genserve.errors import InvalidFieldError

_REQUEST_FIELDS = {
    **{f.name: f"sampling.{f.name}" for f in fields(Sampling)},
    "max_tokens": "stop.max_tokens",
    "min_tokens": "stop.min_tokens",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "include_stop_str_in_output": "stop.include_stop",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "skip_special_tokens": "output.skip_special_tokens",
    "stream_interval": "output.stream_interval",
    "detokenize": "output.text",
    "structured_outputs": "constraint",
}
"""vLLM's name of a parameter -> path of the field of GenerateRequest that sets it."""

_OURS = frozenset({"output_kind", "flat_logprobs", "skip_clone", "extra_args", "output_text_buffer_length"})
"""Parameters that only this adapter sets."""

ENGINE_PARAMS: Final = {
    "repetition_detection": "",
    "skip_reading_prefix_cache": "",
    "spaces_between_special_tokens": "",
    "thinking_token_budget": "",  # vLLM refuses it without --reasoning-parser or --reasoning-config
    "trace_decode_token_ids": "",  # and this without --enable-trace-replay
    "watermarking": "",
    "logprob_token_ids": "answers have no field for the scores of chosen tokens: use output.logprobs",
    "prompt_logprob_start": "it belongs to prompt_logprob_token_ids, which is not supported",
    "prompt_logprob_token_ids": "answers have no field for the scores of chosen tokens of a prompt: use "
    "output.prompt_logprobs",
    "routed_experts_prompt_start": "answers have no field for the experts that tokens were routed to",
}
"""What else vLLM knows. "" = a client may set it: it changes this request's own answer and nothing else. Otherwise why
not. A parameter without a row is refused: nobody has looked at what it does to other requests."""


def request_field(parameter: str | None) -> str:
    """Path of the request's field behind one of vLLM's parameters."""
    return _REQUEST_FIELDS.get(parameter or "", f"engine_params.{parameter}" if parameter else "request")


def asked_for(request: GenerationRequest) -> set[str]:
    """Names of the parameters that a request sets to something else than what holds without it."""
    default = sampling_fields(GenerationRequest(request.request_id, request.prompt))
    return {name for name, value in sampling_fields(request).items() if default.get(name) != value}


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """Keyword arguments for SamplingParams, except output_kind and structured_outputs, which need vLLM's classes.

    Raises InvalidFieldError for engine_params that are unknown, are another field of the request, or are not for
    clients.
    """
    stop, output = request.stop, request.output
    chosen: dict[str, Any] = {
        name: value
        for name, value in ((f.name, getattr(request.sampling, f.name)) for f in fields(Sampling))
        if value is not None
    }
    # None lets vLLM use the rest of the context; its own default is 16.
    chosen["max_tokens"] = stop.max_tokens
    if stop.min_tokens is not None:
        chosen["min_tokens"] = stop.min_tokens
    chosen["stop"] = list(stop.strings)
    chosen["stop_token_ids"] = list(stop.token_ids)
    chosen["ignore_eos"] = stop.ignore_eos
    chosen["include_stop_str_in_output"] = stop.include_stop
    chosen["logprobs"] = output.logprobs
    chosen["prompt_logprobs"] = output.prompt_logprobs
    chosen["skip_special_tokens"] = output.skip_special_tokens
    chosen["detokenize"] = output.text or bool(stop.strings)
    if output.stream_interval > 1:
        chosen["stream_interval"] = output.stream_interval
    for name, value in request.engine_params.items():
        _check_engine_param(name)
        chosen[name] = value
    return chosen


def _check_engine_param(name: str) -> None:
    path = f"engine_params.{name}"
    if name in _OURS:
        raise InvalidFieldError.of(path, "is set by the daemon")
    if name in _REQUEST_FIELDS:
        raise InvalidFieldError.of(path, f"is another field of the request: {_REQUEST_FIELDS[name]}")
    if (reason := ENGINE_PARAMS.get(name)) is None:
        free = ", ".join(sorted(each for each, closed in ENGINE_PARAMS.items() if not closed))
        raise InvalidFieldError.of(path, f"is no parameter that requests may set; those are {free}")
    if reason:
        raise InvalidFieldError.of(path, f"is not supported, because {reason}")
