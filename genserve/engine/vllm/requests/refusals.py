"""The requests that the engine does not take, whatever entrance they come through: gRPC, a front end or HTTP.

ENGINE_PARAMS says which of vLLM's parameters a request over gRPC may name. TABLE has the values that vLLM does not
check: it says of each what it would do, end the engine for everybody, or put wrong numbers into answers, even into
those of others. Rows about Model Runner V2 are about its fixed tables: it raises an error in the middle of a step,
which ends its engine. docs/refused.md has the tables for users.

A large max_tokens is no row: `bound` reduces it to the context, which changes no answer.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import msgspec
from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from genserve.engine.generation import Sampling
from genserve.errors import InvalidFieldError
from genserve.worker.contract.vllm_settings import V1, V2, runner_of

Params = Any
"""vLLM's SamplingParams, or an object with the attributes that rows read."""

MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
"""internal: sizes of V2's tables in v1/worker/gpu/sample/logit_bias.py. A test compares them."""

REQUEST_FIELDS = {
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
"""vLLM's name of a parameter -> path of the field of GenerateRequest that sets it, which is the path in
GenerationRequest as well."""

MAX_CACHE_SALT: Final = 1024
"""Characters."""
MAX_SEED: Final = 2**63 - 1
"""Of the last sequence: vLLM adds the index of each of the n sequences to the seed, after all checks and without a
bound. V2 has seeds in an array of signed integers."""


def request_field(parameter: str | None) -> str:
    """Path of the request's field behind one of vLLM's parameters."""
    return REQUEST_FIELDS.get(parameter or "", f"engine_params.{parameter}" if parameter else "request")


@dataclass(frozen=True, slots=True)
class Serving:
    """The facts about an engine that rows need. `runner`: v1 or v2; `is_cpu`: its workers compute on a CPU;
    `splits_prompts`: may compute a prompt in pieces; `vocab_size`: of the logits, which a tokenizer may exceed."""

    runner: str
    is_cpu: bool = False
    has_adapters: bool = False
    splits_prompts: bool = False
    has_watermark: bool = False
    vocab_size: int = 2**31

    @classmethod
    def of(cls, config: Any) -> "Serving":
        """That of vLLM's configuration, which every process with a client of the engine has."""
        return cls(
            runner=runner_of(config),
            is_cpu=config.device_config.device_type == "cpu",
            has_adapters=config.lora_config is not None,
            splits_prompts=config.scheduler_config.enable_chunked_prefill
            or config.scheduler_config.long_prefill_token_threshold > 0,
            has_watermark=config.watermark_config is not None,
            vocab_size=config.model_config.get_vocab_size(),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A field of a request that some engines cannot serve. `parameter` is its name in SamplingParams. `where` names
    those engines for people, and `concerns` says whether one is among them. `applies` says whether parameters ask for
    it, of which `given` is not at its default then (default: `parameter`). `problem` goes on after the name of the
    field, `reason` is a clause after "because"."""

    parameter: str
    where: str
    concerns: Callable[[Serving], bool]
    applies: Callable[[Params, Serving], bool]
    problem: str
    reason: str
    given: str = ""

    @property
    def field(self) -> str:
        """Its path in GenerateRequest."""
        return request_field(self.parameter)

    @property
    def message(self) -> str:
        """The text after the field's name in the error."""
        return f"{self.problem}, because {self.reason}"


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
"""The parameters without a field of their own. "" = engine_params may set it: it changes this request's own
answer and nothing else. Otherwise why not. A parameter without a row is refused: nobody has looked at what it does
to other requests."""


def check_names(engine_params: Iterable[str]) -> None:
    """Raises InvalidFieldError if one is unknown, is another field of the request, or is not for clients."""
    for name in engine_params:
        path = f"engine_params.{name}"
        if name in _OURS:
            raise InvalidFieldError.of(path, "is set by the daemon")
        if (field := request_field(name)) != path:
            raise InvalidFieldError.of(path, f"is another field of the request: {field}")
        if (reason := ENGINE_PARAMS.get(name)) is None:
            free = ", ".join(sorted(each for each, closed in ENGINE_PARAMS.items() if not closed))
            raise InvalidFieldError.of(path, f"is no parameter that requests may set; those are {free}")
        if reason:
            raise InvalidFieldError.of(path, f"is not supported, because {reason}")


def check(params: Params, serving: Serving) -> None:
    """Raises InvalidFieldError if the engine cannot serve a request with these parameters. Call it before vLLM
    completes them, so that its own checks do not recommend the other runner, and again afterwards, when stop tokens and
    bad words are token ids."""
    for row in refused(params, serving):
        raise InvalidFieldError.of(row.field, row.message)


def refused(params: Params, serving: Serving) -> list[Row]:
    """The rows that apply."""
    return [
        row
        for row, name, default in _rows_of(serving)
        if (value := getattr(params, name)) is not default and value != default and row.applies(params, serving)
    ]


@lru_cache(maxsize=8)
def _rows_of(serving: Serving) -> list[tuple[Row, str, object]]:
    """The rows that concern an engine, the parameter that has to be given for each to apply, and its default."""
    unset = SamplingParams()
    concerned = ((row, row.given or row.parameter) for row in TABLE if row.concerns(serving))
    return [(row, name, getattr(unset, name)) for row, name in concerned]


def bound(params: SamplingParams, max_model_len: int) -> None:
    """Reduces the numbers of tokens to the context: no sequence is longer. Model Runner V2 adds the prompt's length to
    them in 32 bits, and an overflow would end the engine."""
    params.max_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    params.min_tokens = min(params.min_tokens, params.max_tokens)


class Crossing:
    """vLLM's codec of requests, for the last look at one before EngineCore gets it.

    EngineCore decodes requests outside of any `try`: one value of a wrong type ends the thread that reads requests, for
    everybody. So every request is encoded and decoded here before it is sent.
    """

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def check(self, built: EngineCoreRequest) -> None:
        """Raises InvalidFieldError if EngineCore could not decode it."""
        # The prompt's ids are integers of the vocabulary, and there may be very many. What vLLM makes of images is its
        # own.
        small = msgspec.structs.replace(built, prompt_token_ids=[], prompt_embeds=None, mm_features=None)
        try:
            self._decoder.decode(self._encoder.encode(small))
        except Exception as error:
            found = re.search(r"at `\$\[\d+\]\.(\w+)", str(error))
            raise InvalidFieldError.of(request_field(found[1] if found else None), str(error)) from error


def _v1(serving: Serving) -> bool:
    return serving.runner == V1


def _v2(serving: Serving) -> bool:
    return serving.runner == V2


_V2_IS_FULL: Final = "vLLM's Model Runner V2 holds no more"


def _num_bad_word_tokens(params: Params) -> int:
    return sum(map(len, params.bad_words_token_ids or ()))


TABLE: Final = (
    Row(
        parameter="logprob_token_ids",
        where="v1",
        concerns=_v1,
        applies=lambda params, _: params.logprob_token_ids is not None,
        problem="is not supported",
        reason="all other requests of a step would lose their alternatives: use logprobs",
    ),
    Row(
        parameter="skip_reading_prefix_cache",
        given="prompt_logprobs",
        where="all",
        concerns=lambda _: True,
        applies=lambda params, _: params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False,
        problem="must not be false for prompt_logprobs",
        reason="nothing computes those of tokens that are found in the cache, and uninitialised memory would be "
        "answered: leave it out",
    ),
    Row(
        parameter="stop_token_ids",
        given="min_tokens",
        where="all",
        concerns=lambda _: True,
        applies=lambda params, serving: (
            params.min_tokens > 0 and any(each >= serving.vocab_size for each in params.all_stop_token_ids)
        ),
        problem="must be of the model's vocabulary, its EOS tokens in generation_config.json included, if "
        "stop.min_tokens is set",
        reason="vLLM ends its engine, or forbids a token of another request instead",
    ),
    Row(
        parameter="prompt_logprobs",
        where="CPU with --enable-lora",
        concerns=lambda serving: serving.is_cpu and serving.has_adapters,
        applies=lambda params, _: params.prompt_logprobs is not None,
        problem="cannot be used on the CPU with --enable-lora",
        reason="vLLM mistakes the prompt's tokens for the batch's requests there, and its engine ends",
    ),
    Row(
        parameter="seed",
        where="CPU with --enable-chunked-prefill or --long-prefill-token-threshold",
        concerns=lambda serving: serving.is_cpu and serving.splits_prompts,
        applies=lambda params, _: params.seed is not None,
        problem="cannot be used on the CPU with --enable-chunked-prefill or --long-prefill-token-threshold",
        reason="vLLM ends its engine there when a prompt with a seed is computed in pieces",
    ),
    Row(
        parameter="watermarking",
        where="without --watermark-config",
        concerns=lambda serving: not serving.has_watermark,
        applies=lambda params, _: params.watermarking is True,
        problem="needs --watermark-config",
        reason="the engine has no watermark to apply",
    ),
    Row(
        parameter="allowed_token_ids",
        where="v2",
        concerns=_v2,
        applies=lambda params, _: len(params.allowed_token_ids or ()) > MAX_ALLOWED_TOKEN_IDS,
        problem=f"must have at most {MAX_ALLOWED_TOKEN_IDS} entries",
        reason=_V2_IS_FULL,
    ),
    Row(
        parameter="logit_bias",
        where="v2",
        concerns=_v2,
        applies=lambda params, _: len(params.logit_bias or ()) > MAX_LOGIT_BIASES,
        problem=f"must have at most {MAX_LOGIT_BIASES} entries",
        reason=_V2_IS_FULL,
    ),
    Row(
        parameter="bad_words",
        given="bad_words_token_ids",
        where="v2",
        concerns=_v2,
        applies=lambda params, _: _num_bad_word_tokens(params) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        problem="must not be longer than VLLM_MAX_BAD_WORDS_TOTAL_TOKENS tokens together (1024 by default)",
        reason=_V2_IS_FULL,
    ),
    Row(
        parameter="bad_words",
        given="bad_words_token_ids",
        where="v2",
        concerns=_v2,
        applies=lambda params, serving: any(
            word[-1] >= serving.vocab_size for word in params.bad_words_token_ids or ()
        ),
        problem="must end with a token of the model, not one that only its tokenizer has",
        reason="vLLM's Model Runner V2 would forbid a token of another request instead",
    ),
    Row(
        parameter="stop_token_ids",
        given="min_tokens",
        where="v2",
        concerns=_v2,
        applies=lambda params, _: params.min_tokens > 0 and len(params.all_stop_token_ids) > MAX_STOP_TOKEN_IDS,
        problem=f"must have at most {MAX_STOP_TOKEN_IDS} entries, the model's EOS tokens included, if stop.min_tokens "
        "is set",
        reason=_V2_IS_FULL,
    ),
    Row(
        parameter="seed",
        where="all",
        concerns=lambda _: True,
        applies=lambda params, _: params.seed is not None and params.seed + params.n - 1 > MAX_SEED,
        problem="must not exceed 64 bits as seed + n - 1",
        reason="vLLM adds the index of each of the n sequences to the seed",
    ),
)
"""The order in which a request is checked."""
