"""What the rest of the daemon knows of an engine: the protocol and the types that cross it.

Owns no behaviour. `engine.vllm` implements it on AsyncLLM; a router over replicas can implement it as well, and the
servicers serve both.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from genserve.errors import InvalidFieldError


class PauseMode(enum.Enum):
    """What happens to requests in flight at a pause."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class KvPolicy(enum.Enum):
    """What happens to keys and values computed before a pause."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"


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

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidFieldError.of("stop.max_tokens", f"must be at least 1, is {self.max_tokens}")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise InvalidFieldError.of("stop.min_tokens", f"must be at least 0, is {self.min_tokens}")
        if self.time_budget_s is not None and self.time_budget_s <= 0:
            raise InvalidFieldError.of("stop.time_budget", f"must be above 0, is {self.time_budget_s:g} s")


@dataclass(frozen=True, slots=True)
class Output:
    """What updates carry. `stream_interval`: tokens per update and sequence, 0 = one final update."""

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


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens [start, end) were sampled under weights `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Finish:
    """How a sequence ended. `stop` is the stop token's id or the stop string, where there was one."""

    reason: FinishReason
    stop: int | str | None
    num_tokens: int
    weight_spans: Sequence[WeightSpan]
    cumulative_logprob: float | None


@dataclass(slots=True)
class SequenceDelta:
    """What one of the n sequences gained since its last delta."""

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: LogprobColumns | None
    weight_spans: Sequence[WeightSpan]
    finish: Finish | None


@dataclass(slots=True)
class PromptInfo:
    """What is known of the prompt; `logprobs` has num_tokens - 1 rows, as the first token has none."""

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


class GenerationStream(Protocol):
    """An admitted request."""

    @property
    def request_id(self) -> str:
        """Its id, minted when the request had none."""

    async def next(self) -> GenerationUpdate | None:
        """The next update, or None after the last. Updates that were not fetched in time are merged, never lost."""

    async def close(self) -> None:
        """Ends the request if it still runs; safe to call more than once."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves. `tensor_parallel_size` and so on are numbers of ranks; `device` is cpu or cuda."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    device: str
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has to do: sequences, share of the KV cache, output tokens per second, share of prompt tokens
    found in the prefix cache."""

    running: int
    waiting: int
    kv_usage: float
    tokens_per_second: float
    prefix_cache_hit_rate: float


@dataclass(frozen=True, slots=True)
class PauseCounts:
    """Requests that a pause froze and that it ended."""

    kept: int
    aborted: int


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """Where workers find staged bytes: a file they can map, and its size in bytes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One tensor in an arena; `dtype` is safetensors' name, `offset` and `length` are bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """SHA-256 (hex) of one live tensor on one rank ("dp0:pp0:pcp0:tp0")."""

    rank: str
    name: str
    sha256: str


class Engine(Protocol):
    """A generation engine with weights that can be exchanged.

    Every method raises EngineDeadError when the engine dies meanwhile, and DeadlineError when `timeout_s` runs out.
    """

    @property
    def info(self) -> EngineInfo:
        """What it serves."""

    @property
    def weight_version(self) -> int:
        """Version of the weights served; 0 before the first push."""

    async def wait_dead(self) -> None:
        """Returns when the engine has died."""

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admits a request, or raises what is wrong with it."""

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests (None = all) with reason ABORTED; returns the ids that ran and those that did not."""

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""

    def load(self) -> Load:
        """What it has to do now."""

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Stops scheduling; on DeadlineError the engine runs as before."""

    async def resume(self, timeout_s: float) -> None:
        """Schedules again."""

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        """Drops the prefix cache; whether it is dropped."""

    async def prepare_weights(
        self, nonce: str, arena: ArenaRef, tensors: Sequence[StagedTensor], timeout_s: float
    ) -> None:
        """Builds the version `nonce` beside the live one on every rank, while generation goes on. When any rank fails
        it raises PushRolledBackError and nothing is left of the attempt."""

    async def commit_weights(self, nonce: str, version: int, timeout_s: float) -> None:
        """Exchanges live and prepared weights on every rank and labels later tokens `version`. Call while paused. When
        any rank fails, all are exchanged back: PushRolledBackError, or EngineTaintedError if that cannot be proven."""

    async def discard_weights(self, nonce: str, timeout_s: float) -> None:
        """Frees what a prepared version, or the one that a commit replaced, still holds."""

    async def weight_digests(self, timeout_s: float) -> list[WeightDigest]:
        """Digests of every live tensor on every rank."""
