"""Requests that an engine does not take: the table, and vLLM's Model Runner V2 itself."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from vllm import envs
from vllm.config import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import logit_bias
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.refusals import (
    ENGINE_PARAMS,
    TABLE,
    Serving,
    check,
    check_names,
    refused,
    request_field,
)
from genserve.errors import InvalidFieldError
from genserve.worker.contract.vllm_settings import V1, V2, runner_of
from tests.support.refusals import refuses

Make = Callable[[int], SamplingParams]


def with_bad_words(num_tokens: int) -> SamplingParams:
    """With one that has so many tokens."""
    return with_bad_words_of([7] * num_tokens)


def with_bad_words_of(*words: list[int]) -> SamplingParams:
    """As vLLM completes parameters: with token ids."""
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [*words]
    return params


# By parameter: parameters with so much of it, and how much V2 takes.
LIMITS: dict[str, tuple[Make, int]] = {
    "allowed_token_ids": (lambda num: SamplingParams(allowed_token_ids=[*range(num)]), 1024),
    "logit_bias": (lambda num: SamplingParams(logit_bias=dict.fromkeys(range(num), 1.0)), 1024),
    "bad_words": (with_bad_words, 1024),
    "stop_token_ids": (lambda num: SamplingParams(min_tokens=1, stop_token_ids=[*range(num)]), 128),
}
IN_V1, IN_V2 = Serving(V1), Serving(V2)
# By parameter: what asks for it, an engine that refuses it, engines that take it, and what everyone takes instead.
OTHERS: dict[str, tuple[SamplingParams, Serving, list[Serving], SamplingParams]] = {
    "logprob_token_ids": (
        SamplingParams(logprobs=1, logprob_token_ids=[3]), IN_V1, [IN_V2], SamplingParams(logprobs=1),
    ),
    "skip_reading_prefix_cache": (
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False), IN_V2, [],
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=True),
    ),
    "prompt_logprobs": (
        SamplingParams(prompt_logprobs=0), Serving(V1, is_cpu=True, has_adapters=True),
        [Serving(V1, is_cpu=True), Serving(V1, has_adapters=True)], SamplingParams(logprobs=0),
    ),
    "seed": (
        SamplingParams(seed=0), Serving(V1, is_cpu=True, splits_prompts=True),
        [Serving(V1, is_cpu=True), Serving(V1, splits_prompts=True)], SamplingParams(),
    ),
    "bad_words": (
        with_bad_words_of([3], [4, 512]), Serving(V2, vocab_size=512), [Serving(V2, vocab_size=513), IN_V1],
        with_bad_words_of([511], [512, 4]),
    ),
    "stop_token_ids": (
        SamplingParams(min_tokens=1, stop_token_ids=[4, 512]), Serving(V1, vocab_size=512),
        [Serving(V1, vocab_size=513)], SamplingParams(min_tokens=1, stop_token_ids=[511]),
    ),
    "watermarking": (
        SamplingParams(watermarking=True), IN_V2, [Serving(V2, has_watermark=True)], SamplingParams(watermarking=False),
    ),
}  # fmt: skip


def names(params: SamplingParams, serving: Serving) -> list[str]:
    """The parameters that are refused."""
    return [row.parameter for row in refused(params, serving)]


def test_the_table_is_whole() -> None:
    """Every row has a test."""
    assert sorted(row.parameter for row in TABLE) == sorted([*LIMITS, *OTHERS, "seed"])


def test_ordinary_parameters_are_served_by_all() -> None:
    """Also stop tokens without a least number of tokens, which V2 does not have to hold."""
    for params in (SamplingParams(), SamplingParams(stop_token_ids=[*range(500)]), SamplingParams(min_tokens=9)):
        assert names(params, IN_V1) == names(params, IN_V2) == []


@pytest.mark.parametrize("parameter", OTHERS)
def test_harmful_requests_are_refused_only_where_they_do_harm(parameter: str) -> None:
    """And nothing else is."""
    asks, refuses, takes, instead = OTHERS[parameter]
    assert names(asks, refuses) == [parameter]
    assert [names(asks, each) for each in takes] == [[]] * len(takes)
    assert names(instead, refuses) == []


@pytest.mark.parametrize(("chunks", "threshold", "splits"), [(True, 0, True), (False, 16, True), (False, 0, False)])
def test_an_engines_configuration_says_what_rows_ask(chunks: bool, threshold: int, splits: bool) -> None:
    """A daemon, a front end and a server over HTTP have the same one."""
    config = SimpleNamespace(
        use_v2_model_runner=False, device_config=SimpleNamespace(device_type="cpu"), lora_config=object(),
        scheduler_config=SchedulerConfig(
            max_model_len=64, is_encoder_decoder=False, enable_chunked_prefill=chunks,
            long_prefill_token_threshold=threshold,
        ),
        watermark_config=object(), model_config=SimpleNamespace(get_vocab_size=lambda: 512),
    )  # fmt: skip
    assert Serving.of(config) == Serving(
        V1, is_cpu=True, has_adapters=True, splits_prompts=splits, has_watermark=True, vocab_size=512
    )


@pytest.mark.parametrize("parameter", LIMITS)
def test_more_than_v2_holds_is_refused_there_and_served_by_v1(parameter: str) -> None:
    """As much as it holds is served."""
    make, most = LIMITS[parameter]
    check(make(most), IN_V2)
    check(make(most + 1), IN_V1)
    with pytest.raises(InvalidFieldError) as caught:
        check(make(most + 1), IN_V2)
    (violation,) = caught.value.violations
    assert violation.field == request_field(parameter)
    assert "Model Runner V2" in violation.description


@pytest.mark.parametrize("serving", [IN_V1, IN_V2])
def test_the_seed_of_the_last_sequence_has_64_bits(serving: Serving) -> None:
    """vLLM computes it when it has checked the request."""
    assert names(SamplingParams(n=2, seed=2**63 - 2), serving) == []
    for params in (SamplingParams(seed=2**63), SamplingParams(n=2, seed=2**63 - 1)):
        assert names(params, serving) == ["seed"]


def test_the_limits_are_those_of_vllm() -> None:
    """V2 raises an error for more of them in the middle of a step."""
    sources = {each: inspect.getsource(each.add_request) for each in (LogitBiasState, BadWordsState)}
    assert [source.count('"Too many ') for source in sources.values()] == [3, 2], "more of them, or fewer"
    assert refusals.MAX_ALLOWED_TOKEN_IDS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert refusals.MAX_LOGIT_BIASES == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert refusals.MAX_STOP_TOKEN_IDS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS == 1024


@pytest.mark.parametrize(("uses_v2", "runner"), [(True, V2), (False, V1)])
def test_the_runner_is_the_one_that_vllm_has_resolved(uses_v2: bool, runner: str) -> None:
    """Its configuration and its worker say it under one name."""
    assert runner_of(SimpleNamespace(use_v2_model_runner=uses_v2)) == runner


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tempreature", "watermarking"),
        ("temperature", "sampling.temperature"),
        ("output_kind", None),
        ("logprob_token_ids", "output.logprobs"),
        ("_eos_token_id", "watermarking"),
    ],
)
def test_unknown_engine_parameter_or_one_with_its_own_field_is_refused(name: str, says: str | None) -> None:
    """Nothing is ignored in silence. A field of ours is named, or the parameters that there are."""
    with refuses(InvalidFieldError, field=f"engine_params.{name}", says=says):
        check_names([name])


def test_each_of_vllms_parameters_is_classified() -> None:
    """A new vLLM's new one fails here: what does it do to other requests of a step, and is it told in an answer?"""
    ours = {"output_kind", "flat_logprobs", "skip_clone", "extra_args", "output_text_buffer_length"}
    known = {f.name for f in msgspec.structs.fields(SamplingParams) if not f.name.startswith("_")}
    own = {name for name in known if not request_field(name).startswith("engine_params.")}
    assert known - own - ours == ENGINE_PARAMS.keys()


def test_the_documentation_has_every_row() -> None:
    """Users read it before an answer says so."""
    assert documented("## Requests") == [[f"`{row.field}`", row.where, row.problem, row.reason] for row in TABLE]


def test_the_documentation_lists_which_parameters_requests_may_set() -> None:
    """And why not, or what it needs."""
    rows = documented("## engine_params")
    assert [row[:2] for row in rows] == [[f"`{name}`", "no" if why else "yes"] for name, why in ENGINE_PARAMS.items()]
    assert [row[2] for row in rows if row[1] == "no"] == list(filter(None, ENGINE_PARAMS.values()))


def documented(title: str) -> list[list[str]]:
    """The rows of a section of docs/refused.md."""
    page = (Path(__file__).parents[5] / "docs/refused.md").read_text()
    section = page.partition(f"\n{title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
