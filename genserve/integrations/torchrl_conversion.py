"""vLLM's prompts and SamplingParams as those of genserve's client, and its generations in the shape of vLLM's
RequestOutput, whose fields torchrl's vLLMWrapper reads. vLLM is not imported: fields are read by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from genserve.client.generation.options import GenerateOptions, SamplingOptions
from genserve.client.generation.results import GeneratedSequence, Generation, Logprobs, Prompt
from genserve.errors import UnsupportedError

VllmPrompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's TextPrompt or TokensPrompt."""
_MAX_TOKENS: Final = 16
"""vLLM's default where there are no SamplingParams; the client's is the rest of the context."""
_SAME: Final = (
    *SamplingOptions.__annotations__,
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)
_RENAMED: Final = {"detokenize": "text", "include_stop_str_in_output": "include_stop"}
_CONSTRAINTS: Final = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
# How an engine in the caller's own process hands tokens over, and what vLLM derives from the other fields.
_WITHOUT_MEANING: Final = {
    "flat_logprobs",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "stream_interval",
    "structured_outputs",  # see _constraint
}

# What ended a sequence, in the words of vLLM.
_FINISH_REASONS: Final = {
    "eos": "stop",
    "stop_string": "stop",
    "stop_token": "stop",
    "time_limit": "length",
    "aborted": "abort",
    "paused": "abort",
}


def prompt_list(prompts: Any, prompt_token_ids: Any = None) -> tuple[list[VllmPrompt], bool]:
    """The prompts of a call, and whether they are many: a list of token ids is one. Raises ValueError for none, and for
    both arguments."""
    if (prompts is None) == (prompt_token_ids is None):
        raise ValueError("pass either prompts or prompt_token_ids")
    given = prompts if prompt_token_ids is None else prompt_token_ids
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        return [given], False
    if not given:
        raise ValueError("prompts must not be empty")
    return ([given], False) if isinstance(given[0], int) else (list(given), True)


def plain_prompt(prompt: VllmPrompt) -> str | Sequence[int]:
    """Text or token ids. Raises UnsupportedError for images, embeddings and the like."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = {name: value for name, value in prompt.items() if value is not None}
    found = given.pop("prompt_token_ids", None)
    text = given.pop("prompt", None)
    if given or (found is None and text is None):
        raise UnsupportedError(f"the daemon accepts text and token ids, not {', '.join(sorted(given)) or 'nothing'}")
    return cast(str | Sequence[int], text if found is None else found)


def generate_options(params: Any) -> GenerateOptions:
    """The options of vLLM's SamplingParams, or of a mapping of its fields. What has no option of its own is passed on
    in `engine_params` where it differs from the default."""
    if params is None:
        return GenerateOptions(max_tokens=_MAX_TOKENS)
    fields = _fields(params)
    defaults = {} if isinstance(params, Mapping) else _fields(type(params)())
    options: dict[str, Any] = {name: fields.pop(name, None) for name in _SAME}
    options |= {option: fields.pop(name, None) for name, option in _RENAMED.items()}
    options |= _constraint(fields.get("structured_outputs"))
    if fields.get("skip_reading_prefix_cache") == (options["prompt_logprobs"] is not None):
        del fields["skip_reading_prefix_cache"]  # what vLLM derives by itself
    others = {
        name: value
        for name, value in fields.items()
        if name not in _WITHOUT_MEANING and value is not None and value != defaults.get(name)
    }
    if others:
        options["engine_params"] = others
    given = {name: value for name, value in options.items() if value is not None and value != [] and value != {}}
    return cast(GenerateOptions, given)


def _constraint(params: Any) -> dict[str, Any]:
    """The constraint of vLLM's StructuredOutputsParams. Raises UnsupportedError for what only vLLM has."""
    if params is None:
        return {}
    fields = {name: value for name, value in _fields(params).items() if value is not None and value is not False}
    unknown = sorted(fields.keys() - _CONSTRAINTS.keys())
    if unknown:
        raise UnsupportedError(f"structured_outputs: {', '.join(unknown)} cannot be set by a request")
    return {_CONSTRAINTS[name]: value for name, value in fields.items()}


def _fields(params: Any) -> dict[str, Any]:
    """The public fields of a mapping, a msgspec struct, a dataclass, or an object with attributes."""
    if isinstance(params, Mapping):
        return dict(params)
    if hasattr(params, "__struct_fields__"):
        names = params.__struct_fields__
    elif dataclasses.is_dataclass(params):
        names = [each.name for each in dataclasses.fields(params)]
    else:
        names = vars(params)
    return {name: getattr(params, name) for name in names if not name.startswith("_")}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token. `rank`: 1 = most likely. Tokens are not decoded here."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n sequences. `logprobs`: for each token those of itself and its alternatives, by token id."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A complete generation. `generation` is the original, with the spans of weight versions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    generation: Generation = field(repr=False)
    finished: bool = True
    metrics: None = None
    lora_request: object = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None


def request_output(generation: Generation, text: str | None, lora_request: object = None) -> RequestOutput:
    """Converts a generation that has its prompt's token ids. `text`: of the prompt, None if it was token ids."""
    prompt = Prompt(0, 0, [], None) if generation.prompt is None else generation.prompt
    return RequestOutput(
        request_id=generation.request_id,
        prompt=text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=_of_prompt(prompt),
        outputs=[_completion(sequence) for sequence in generation.sequences],
        num_cached_tokens=prompt.num_cached_tokens,
        generation=generation,
        lora_request=lora_request,
    )


def _completion(sequence: GeneratedSequence) -> CompletionOutput:
    finish = sequence.finish
    output = CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=sequence.token_ids,
        cumulative_logprob=None,
        logprobs=None if sequence.logprobs is None else _rows(sequence.token_ids, sequence.logprobs),
    )
    if finish is not None:
        output.cumulative_logprob = finish.cumulative_logprob
        output.finish_reason = _FINISH_REASONS.get(finish.reason, finish.reason)
        output.stop_reason = finish.stop_string if finish.stop_token_id is None else finish.stop_token_id
    return output


def _of_prompt(prompt: Prompt) -> list[dict[int, Logprob] | None] | None:
    """The first token has none, as in vLLM."""
    return None if prompt.logprobs is None else [None, *_rows(prompt.token_ids[1:], prompt.logprobs)]


def _rows(token_ids: list[int], logprobs: Logprobs) -> list[dict[int, Logprob]]:
    rows = []
    for position, token_id in enumerate(token_ids):
        best = enumerate(logprobs.alternatives(position), start=1)
        row = {alternative: Logprob(value, rank) for rank, (alternative, value) in best}
        row[token_id] = Logprob(logprobs.sampled[position], logprobs.ranks[position])
        rows.append(row)
    return rows
