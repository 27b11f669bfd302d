"""Requests and their results: the types of generation that cross the Engine protocol. No behaviour."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genserve.errors import PromptTooLongError


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    PAUSED = "paused"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenised with the model's special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, rendered with the model's own template; `template_params` are further arguments of the template."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_params: Mapping[str, object] = field(default_factory=dict)


AnyPrompt = TextPrompt | TokenPrompt | ChatPrompt


def prompt_too_long(size: str, num_tokens: int, max_model_len: int) -> PromptTooLongError:
    """The error for a prompt that leaves no room for output. `size` describes the prompt for people."""
    return PromptTooLongError(
        f"the prompt has {size}; the context of {max_model_len} tokens also needs room for one token of output",
        metadata={"num_tokens": str(num_tokens), "max_model_len": str(max_model_len)},
    )


class ConstraintKind(enum.Enum):
    """Kinds of structured output, named as the fields of vLLM's StructuredOutputsParams."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restricts the output; `value` is text, a list of choices, or True for JSON_OBJECT."""

    kind: ConstraintKind
    value: str | list[str] | bool


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; None = the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """When a sequence ends; None = the engine's default. `time_budget_s` is seconds from admission."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    strings: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    time_budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What updates contain. `stream_interval`: tokens per update and sequence; 0 = one final update."""

    text: bool = True
    token_ids: bool = True
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_token_ids: bool = False
    stream_interval: int = 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it. `engine_params`: further SamplingParams fields by vLLM's names."""

    request_id: str
    prompt: AnyPrompt
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)
    output: Output = field(default_factory=Output)
    constraint: Constraint | None = None
    lora_name: str = ""
    priority: int = 0
    data_parallel_rank: int | None = None
    cache_salt: str = ""
    min_weight_version: int | None = None
    engine_params: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities (natural logarithm) of consecutive tokens.

    `sampled` and `ranks` have one entry a token; `token_ids` and `values` are row-major, `width` entries a token.
    """

    sampled: list[float]
    ranks: list[int]
    width: int
    token_ids: list[int]
    values: list[float]


class WeightSpan(NamedTuple):
    """Output tokens [start, end) were sampled under weights `version`, and `lora_version` of an adapter; 0 = none."""

    version: int
    start: int
    end: int
    lora_version: int = 0


@dataclass(slots=True)
class Finish:
    """How a sequence ended. `stop` is the stop token's id or the stop string, if there was one."""

    reason: FinishReason
    stop: int | str | None
    num_tokens: int
    weight_spans: Sequence[WeightSpan]
    cumulative_logprob: float | None


@dataclass(slots=True)
class SequenceDelta:
    """New output of one of the n sequences since its last delta."""

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: LogprobColumns | None
    weight_spans: Sequence[WeightSpan]
    finish: Finish | None


@dataclass(slots=True)
class PromptInfo:
    """Facts about the prompt. `logprobs` has num_tokens - 1 rows, because the first token has none."""

    num_tokens: int
    num_cached_tokens: int
    token_ids: Sequence[int] | None
    logprobs: LogprobColumns | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class GenerationUpdate:
    """Deltas of one request: `prompt` on the first update, `usage` on the last."""

    prompt: PromptInfo | None
    outputs: Sequence[SequenceDelta]
    usage: Usage | None
