"""A generation in the shape that vLLM gives its own."""

from dataclasses import fields

import pytest
from vllm.outputs import CompletionOutput as OfVllm
from vllm.v1.engine import FinishReason

from genserve.client.generation.results import Finish, GeneratedSequence, Generation, Logprobs, Prompt
from genserve.integrations.torchrl_answers import CompletionOutput, Logprob, request_output


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
