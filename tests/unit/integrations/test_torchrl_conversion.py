"""A generation in the shape that vLLM gives its own."""

from dataclasses import fields
from typing import Any

import pytest
from vllm import SamplingParams, TextPrompt, TokensPrompt
from vllm.outputs import CompletionOutput as OfVllm
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from genserve.client.generation.results import Finish, GeneratedSequence, Generation, Logprobs, Prompt
from genserve.errors import UnsupportedError
from genserve.integrations.torchrl_conversion import (
    CompletionOutput,
    Logprob,
    generate_options,
    plain_prompt,
    prompt_list,
    request_output,
)
from tests.support.refusals import refuses

IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("prompts", "token_ids", "expected"),
    [
        ("a", None, (["a"], False)),
        (IDS, None, ([IDS], False)),
        (None, IDS, ([IDS], False)),
        (None, [IDS], ([IDS], True)),
        (["a", IDS], None, (["a", IDS], True)),
        (TokensPrompt(prompt_token_ids=IDS), None, ([{"prompt_token_ids": IDS}], False)),
    ],
)
def test_a_list_of_token_ids_is_one_prompt(prompts: Any, token_ids: Any, expected: Any) -> None:
    """And a list of anything else is many, whose answer is a list."""
    assert prompt_list(prompts, token_ids) == expected


@pytest.mark.parametrize(("prompts", "token_ids"), [(None, None), ("a", IDS), ([], None), (None, [])])
def test_no_prompt_and_two_kinds_of_them_are_refused(prompts: Any, token_ids: Any) -> None:
    with pytest.raises(ValueError, match="prompts"):
        prompt_list(prompts, token_ids)


def test_prompts_of_vllm_are_text_or_token_ids() -> None:
    """What a daemon does not take is refused by name, and not dropped."""
    assert plain_prompt(TextPrompt(prompt="a")) == "a"
    assert plain_prompt(TokensPrompt(prompt_token_ids=IDS, prompt="a")) == IDS
    with refuses(UnsupportedError, says="multi_modal_data"):
        plain_prompt(TextPrompt(prompt="a", multi_modal_data={"image": 1}))
    with refuses(UnsupportedError):
        plain_prompt({})


def test_defaults_are_those_of_vllm() -> None:
    """Above all max_tokens, which is 16 there and the rest of the context here."""
    assert generate_options(None)["max_tokens"] == SamplingParams().max_tokens == 16
    assert generate_options(SamplingParams())["max_tokens"] == 16
    assert "max_tokens" not in generate_options(SamplingParams(max_tokens=None))
    assert "engine_params" not in generate_options(SamplingParams())


def test_every_field_has_an_option_or_is_passed_on() -> None:
    """What vLLM derives by itself and what only an engine in the same process needs is left out."""
    params = SamplingParams(
        n=2,
        seed=3,
        temperature=0.5,
        stop=["x"],
        logprobs=1,
        prompt_logprobs=0,
        detokenize=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        spaces_between_special_tokens=False,
        logit_bias={4: 1.0},
    )
    options = generate_options(params)
    expected: dict[str, Any] = {
        "n": 2,
        "seed": 3,
        "temperature": 0.5,
        "stop": ["x"],
        "logprobs": 1,
        "prompt_logprobs": 0,
        "text": True,
        "skip_special_tokens": False,
        "include_stop": True,
        "logit_bias": {4: 1.0},
        "max_tokens": 16,
        "engine_params": {"spaces_between_special_tokens": False},
    }
    assert {name: options.get(name) for name in expected} == expected
    assert generate_options({"n": 2, "thinking_token_budget": 3}) == {
        "n": 2,
        "engine_params": {"thinking_token_budget": 3},
    }


def test_a_cache_that_shall_not_be_read_is_passed_on() -> None:
    """If it was asked for: with log-probabilities of the prompt vLLM sets it by itself."""
    asked = generate_options(SamplingParams(skip_reading_prefix_cache=True))
    assert asked["engine_params"] == {"skip_reading_prefix_cache": True}


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [("json", {"type": "object"}, "json_schema"), ("regex", "[ab]", "regex"), ("choice", ["a"], "choice")],
)
def test_a_constraint_is_the_clients(name: str, value: Any, option: str) -> None:
    """One that a request cannot have is refused."""
    constrained = StructuredOutputsParams(**{name: value})
    assert generate_options(SamplingParams(structured_outputs=constrained)).get(option) == value
    constrained.whitespace_pattern = " "
    with refuses(UnsupportedError, says="whitespace_pattern"):
        generate_options(SamplingParams(structured_outputs=constrained))


def generated(reason: str = "length", stop_token_id: int | None = None, stop_string: str | None = None) -> Generation:
    """Two tokens after a prompt of two, one alternative each: the first token is the most likely, the second is not."""
    sequence = GeneratedSequence(0, "ab", [1, 2], Logprobs([-0.1, -3.0], [1, 5], 1, [1, 9], [-0.1, -0.2]))
    sequence.finish = Finish(reason, stop_token_id, stop_string, 2, [], -3.1)
    return Generation("r", Prompt(2, 1, [7, 8], Logprobs([-1.0], [2], 1, [4], [-0.5])), [sequence])


def test_log_probabilities_are_by_token_id() -> None:
    """Of the token itself and its alternatives, with their ranks; the prompt's first token has none."""
    answer = request_output(generated(), "text")
    assert (answer.request_id, answer.prompt, answer.prompt_token_ids) == ("r", "text", [7, 8])
    assert (answer.num_cached_tokens, answer.finished) == (1, True)
    assert answer.prompt_logprobs == [None, {4: Logprob(-0.5, 1), 8: Logprob(-1.0, 2)}]
    (output,) = answer.outputs
    assert (output.text, output.token_ids, output.cumulative_logprob) == ("ab", [1, 2], -3.1)
    assert output.logprobs == [{1: Logprob(-0.1, 1)}, {9: Logprob(-0.2, 1), 2: Logprob(-3.0, 5)}]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (generated("eos"), ("stop", None)),
        (generated("stop_token", stop_token_id=0), ("stop", 0)),
        (generated("stop_string", stop_string="b"), ("stop", "b")),
        (generated("length"), ("length", None)),
        (generated("time_limit"), ("length", None)),
        (generated("aborted"), ("abort", None)),
        (generated("repetition"), ("repetition", None)),
    ],
)
def test_a_sequence_ends_in_the_words_of_vllm(generation: Generation, expected: tuple[str, int | str | None]) -> None:
    (output,) = request_output(generation, None).outputs
    assert (output.finish_reason, output.stop_reason) == expected
    assert output.finish_reason in {str(each) for each in FinishReason}


def test_what_was_not_asked_for_is_none() -> None:
    """As in vLLM."""
    answer = request_output(Generation("r", Prompt(1, 0, [7], None), [GeneratedSequence(0)]), None)
    assert answer.prompt_logprobs is answer.outputs[0].logprobs is None


def test_a_completion_has_no_field_that_vllms_lacks() -> None:
    """torchrl makes its own out of vLLM's and ours, by name."""
    assert {each.name for each in fields(CompletionOutput)} <= {each.name for each in fields(OfVllm)}
