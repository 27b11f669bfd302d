"""Requests that a model runner of vLLM's cannot serve: the table, and vLLM's Model Runner V2 itself."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import logit_bias
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from genserve.engine.vllm.requests import runner_limits
from genserve.engine.vllm.requests.runner_limits import TABLE, check, refused
from genserve.errors import InvalidFieldError
from genserve.worker.contract.runners import V1, V2, runner_of

Make = Callable[[int], SamplingParams]


def with_bad_words(num_tokens: int) -> SamplingParams:
    """As vLLM completes parameters: with token ids."""
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[7] * num_tokens]
    return params


# By field: parameters with so much of it, and how much V2 takes.
LIMITS: dict[str, tuple[Make, int]] = {
    "sampling.allowed_token_ids": (lambda num: SamplingParams(allowed_token_ids=[*range(num)]), 1024),
    "sampling.logit_bias": (lambda num: SamplingParams(logit_bias=dict.fromkeys(range(num), 1.0)), 1024),
    "sampling.bad_words": (with_bad_words, 1024),
    "stop.token_ids": (lambda num: SamplingParams(min_tokens=1, stop_token_ids=[*range(num)]), 128),
}
SCORES = SamplingParams(prompt_logprob_token_ids=[[1, 2]])


def fields(params: SamplingParams, runner: str) -> list[str]:
    """Those that are refused."""
    return [row.field for row in refused(params, runner)]


def test_the_table_is_whole() -> None:
    """Every row has a field of its own, and a test of how much of it is too much."""
    names = [row.field for row in TABLE]
    assert len(set(names)) == len(names)
    assert {*LIMITS, "engine_params.prompt_logprob_token_ids"} == set(names)
    assert all(row.runners and set(row.runners) <= {V1, V2} for row in TABLE)


def test_ordinary_parameters_are_served_by_both() -> None:
    """Also stop tokens without a least number of tokens, which V2 does not have to hold."""
    for params in (SamplingParams(), SamplingParams(stop_token_ids=[*range(500)]), SamplingParams(min_tokens=9)):
        assert fields(params, V1) == fields(params, V2) == []


@pytest.mark.parametrize("field", LIMITS)
def test_more_than_v2_holds_is_refused_there_and_served_by_v1(field: str) -> None:
    """As much as it holds is served."""
    make, most = LIMITS[field]
    check(make(most), V2)
    check(make(most + 1), V1)
    with pytest.raises(InvalidFieldError) as caught:
        check(make(most + 1), V2)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert "Model Runner V2" in violation.description


def test_scores_of_chosen_tokens_of_a_prompt_are_refused_by_either() -> None:
    """V1 does not compute them. V2 does, and nothing of an answer could hold them."""
    assert fields(SCORES, V1) == fields(SCORES, V2) == ["engine_params.prompt_logprob_token_ids"]


def test_the_limits_are_those_of_vllm() -> None:
    """V2 raises an error for more of them in the middle of a step."""
    sources = {each: inspect.getsource(each.add_request) for each in (LogitBiasState, BadWordsState)}
    assert [source.count('"Too many ') for source in sources.values()] == [3, 2], "more of them, or fewer"
    assert runner_limits.MAX_ALLOWED_TOKEN_IDS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert runner_limits.MAX_LOGIT_BIASES == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert runner_limits.MAX_STOP_TOKEN_IDS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS == 1024


@pytest.mark.parametrize(("uses_v2", "runner"), [(True, V2), (False, V1)])
def test_the_runner_is_the_one_that_vllm_has_resolved(uses_v2: bool, runner: str) -> None:
    """Its configuration and its worker say it under one name."""
    assert runner_of(SimpleNamespace(use_v2_model_runner=uses_v2)) == runner


def test_the_documentation_has_every_row() -> None:
    """docs/runner.md tells users before an answer does."""
    page = Path(__file__).parents[5] / "docs" / "runner.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    documented = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert documented == [[f"`{row.field}`", " and ".join(row.runners), row.problem, row.reason] for row in TABLE]
