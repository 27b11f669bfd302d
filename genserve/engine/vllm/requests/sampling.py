"""Converts a request to the fields of vLLM's SamplingParams, and vLLM's errors to fields of the request. Pure: knows
the names, not the class."""

from dataclasses import fields
from typing import Any

from genserve.engine.generation import GenerationRequest, Sampling

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


def request_field(parameter: str | None) -> str:
    """Path of the request's field behind one of vLLM's parameters."""
    return _REQUEST_FIELDS.get(parameter or "", f"engine_params.{parameter}" if parameter else "request")


def asked_for(request: GenerationRequest) -> set[str]:
    """Names of the parameters that a request sets to something else than what holds without it."""
    default = sampling_fields(GenerationRequest(request.request_id, request.prompt))
    return {name for name, value in sampling_fields(request).items() if default.get(name) != value}


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """Keyword arguments for SamplingParams, except output_kind and structured_outputs, which need vLLM's classes."""
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
    return {**chosen, **request.engine_params}
