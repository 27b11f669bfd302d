"""Converts a request to the fields of vLLM's SamplingParams, and vLLM's errors to fields of the request. Pure: knows
the names, not the class."""

from collections.abc import Set
from dataclasses import fields
from typing import Any

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


def request_field(parameter: str | None) -> str:
    """Path of the request's field behind one of vLLM's parameters."""
    return _REQUEST_FIELDS.get(parameter or "", f"engine_params.{parameter}" if parameter else "request")


def sampling_fields(request: GenerationRequest, known: Set[str]) -> dict[str, Any]:
    """Keyword arguments for SamplingParams, except output_kind and structured_outputs, which need vLLM's classes.

    `known` are the public fields of SamplingParams. Raises InvalidFieldError for engine_params that are unknown, are
    another field of the request, or are not for clients.
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
        chosen[name] = _checked_engine_param(name, value, known)
    return chosen


def _checked_engine_param(name: str, value: object, known: Set[str]) -> object:
    path = f"engine_params.{name}"
    if name in _OURS:
        raise InvalidFieldError.of(path, "is set by the daemon")
    if name in _REQUEST_FIELDS:
        raise InvalidFieldError.of(path, f"is another field of the request: {_REQUEST_FIELDS[name]}")
    if name not in known:
        free = sorted(known - _OURS - _REQUEST_FIELDS.keys())
        raise InvalidFieldError.of(path, f"is not a field of vLLM's SamplingParams; fields are {', '.join(free)}")
    return value
