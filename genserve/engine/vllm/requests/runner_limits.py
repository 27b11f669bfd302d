"""Requests that one of vLLM's two model runners cannot serve. docs/runner.md says what a model runner is.

vLLM checks at its start which flags a runner supports (VllmConfig._validate_v1_model_runner and the same for v2). It
does not check the fields of requests: Model Runner V2 raises an error in the middle of a step, which ends its engine,
for everybody. TABLE has these fields.

A large max_tokens is no row: V2 adds it to the prompt's length in 32 bits, and `build` reduces it to the context, which
changes no answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from vllm import envs

from genserve.errors import InvalidFieldError
from genserve.worker.contract.runners import V1, V2

Params = Any
"""vLLM's SamplingParams, or an object with the attributes that rows read."""

MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
"""internal: sizes of V2's tables in v1/worker/gpu/sample/logit_bias.py. A test compares them."""

MAX_SEED: Final = 2**63 - 1
"""V2 has seeds in an array of signed integers. vLLM adds a sequence's index to its request's seed without a bound."""


@dataclass(frozen=True, slots=True)
class Row:
    """A field of a request that some runners cannot serve. `field` is its path in GenerateRequest. `applies` says
    whether sampling parameters ask for it. `problem` goes on after the name of the field, `reason` is a clause after
    "because"."""

    field: str
    runners: tuple[str, ...]
    applies: Callable[[Params], bool]
    problem: str
    reason: str

    @property
    def message(self) -> str:
        """What a client reads after the field's name."""
        return f"{self.problem}, because {self.reason}"


def check(params: Params, runner: str) -> None:
    """Raises InvalidFieldError if the runner cannot serve a request with these parameters. Call it before vLLM
    completes them, so that its own checks do not recommend the other runner, and again afterwards, when stop tokens and
    bad words are token ids."""
    for row in refused(params, runner):
        raise InvalidFieldError.of(row.field, row.message)


def refused(params: Params, runner: str) -> Iterator[Row]:
    """The rows that apply."""
    return (row for row in TABLE if runner in row.runners and row.applies(params))


_V2_IS_FULL: Final = "vLLM's Model Runner V2 holds no more"


def _num_bad_word_tokens(params: Params) -> int:
    return sum(map(len, params.bad_words_token_ids or ()))


TABLE: Final = (
    Row(
        field="engine_params.prompt_logprob_token_ids",
        runners=(V1, V2),
        applies=lambda params: params.prompt_logprob_token_ids is not None,
        problem="is not supported",
        reason="answers have no field for the scores of chosen tokens of a prompt: use output.prompt_logprobs",
    ),
    Row(
        field="sampling.allowed_token_ids",
        runners=(V2,),
        applies=lambda params: len(params.allowed_token_ids or ()) > MAX_ALLOWED_TOKEN_IDS,
        problem=f"must have at most {MAX_ALLOWED_TOKEN_IDS} entries",
        reason=_V2_IS_FULL,
    ),
    Row(
        field="sampling.logit_bias",
        runners=(V2,),
        applies=lambda params: len(params.logit_bias or ()) > MAX_LOGIT_BIASES,
        problem=f"must have at most {MAX_LOGIT_BIASES} entries",
        reason=_V2_IS_FULL,
    ),
    Row(
        field="sampling.bad_words",
        runners=(V2,),
        applies=lambda params: _num_bad_word_tokens(params) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        problem="must not be longer than VLLM_MAX_BAD_WORDS_TOTAL_TOKENS tokens together (1024 by default)",
        reason=_V2_IS_FULL,
    ),
    Row(
        field="stop.token_ids",
        runners=(V2,),
        applies=lambda params: params.min_tokens > 0 and len(params.all_stop_token_ids) > MAX_STOP_TOKEN_IDS,
        problem=f"must have at most {MAX_STOP_TOKEN_IDS} entries, the model's EOS tokens included, if stop.min_tokens "
        "is set",
        reason=_V2_IS_FULL,
    ),
    Row(
        field="sampling.seed",
        runners=(V2,),
        applies=lambda params: params.seed is not None and params.seed > MAX_SEED,
        problem="must not exceed 64 bits as seed + n - 1",
        reason="vLLM's Model Runner V2 holds no more",
    ),
)
"""The order in which a request is checked."""
