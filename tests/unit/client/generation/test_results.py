"""The sum of a stream's deltas."""

import dataclasses

from genserve.client.generation.results import (
    Delta,
    GeneratedSequence,
    Generation,
    Logprobs,
    SequenceDelta,
    WeightSpan,
)
from genserve.v1 import generation_pb2, types_pb2


def sequence(index: int, token: int, *spans: tuple[int, int, int], width: int = 0) -> generation_pb2.SequenceDelta:
    """One token of a sequence; spans are (version, start, end), `width` alternatives make log-probabilities."""
    logprobs = types_pb2.Logprobs(
        sampled=[-token], ranks=[token], width=width, token_ids=range(width), values=[-float(i) for i in range(width)]
    )
    return generation_pb2.SequenceDelta(
        index=index,
        text=f"<{token}>",
        token_ids=[token],
        logprobs=logprobs if width else None,
        weight_spans=[types_pb2.WeightSpan(version=v, start=s, end=e) for v, s, e in spans],
    )


def added(*messages: list[generation_pb2.SequenceDelta]) -> Generation:
    """What these messages come to."""
    generation = Generation()
    for outputs in messages:
        generation.add(Delta(generation_pb2.GenerateResponse(outputs=outputs)))
    return generation


def test_each_sequence_has_its_own_tokens() -> None:
    """Those that gained nothing yet are there, and empty."""
    generation = added([sequence(2, 5)], [sequence(0, 1), sequence(2, 6)], [sequence(0, 2)])
    assert [each.index for each in generation.sequences] == [0, 1, 2]
    assert [each.token_ids for each in generation.sequences] == [[1, 2], [], [5, 6]]
    assert [each.text for each in generation.sequences] == ["<1><2>", "", "<5><6>"]
    assert (generation.text, generation.token_ids) == ("<1><2>", [1, 2])
    assert [each.finish_reason for each in generation.sequences] == ["unspecified"] * 3


def test_nothing_is_an_empty_text() -> None:
    """Before the first message."""
    assert (Generation().text, Generation().token_ids) == ("", [])


def test_a_text_may_be_read_while_it_grows() -> None:
    """It is joined from its pieces then; sequences with the same text are equal, however it came."""
    sequence = GeneratedSequence(0, "<")
    for token in range(3):
        sequence.add(SequenceDelta(generation_pb2.SequenceDelta(text=str(token))))
        assert sequence.text == "<" + "".join(map(str, range(token + 1)))
    assert sequence == GeneratedSequence(0, "<012") == dataclasses.replace(sequence)
    assert "text='<012'" in repr(sequence) and dataclasses.asdict(sequence)["text"] == "<012"
    sequence.text = "other"
    assert sequence.text == "other"


def test_spans_that_touch_and_have_one_version_are_one() -> None:
    """A gap would claim tokens that nobody has seen; another version is another span."""
    (joined,) = added([sequence(0, 1, (1, 0, 1))], [sequence(0, 2, (1, 1, 2), (2, 2, 3))]).sequences
    assert joined.weight_spans == [WeightSpan(1, 0, 2), WeightSpan(2, 2, 3)]
    (later,) = added([sequence(0, 1, (1, 0, 1), (2, 1, 2))], [sequence(0, 2, (2, 2, 3))]).sequences
    assert later.weight_spans == [WeightSpan(1, 0, 1), WeightSpan(2, 1, 3)]
    (apart,) = added([sequence(0, 1, (1, 0, 1))], [sequence(0, 2, (1, 2, 3))]).sequences
    assert apart.weight_spans == [WeightSpan(1, 0, 1), WeightSpan(1, 2, 3)]


def test_the_last_delta_says_all_spans_again() -> None:
    """They replace what was added up, and are nobody else's list."""
    last = sequence(0, 2, (1, 1, 2))
    last.finish.reason = generation_pb2.FINISH_REASON_LENGTH
    for version, start in ((1, 0), (2, 1)):
        last.finish.weight_spans.add(version=version, start=start, end=start + 1)
    (ended,) = added([sequence(0, 1, (1, 0, 1))], [last]).sequences
    assert (ended.finish_reason, ended.weight_spans) == ("length", [WeightSpan(1, 0, 1), WeightSpan(2, 1, 2)])
    assert ended.finish is not None and ended.finish.weight_spans is not ended.weight_spans


def test_logprobs_are_rows_of_alternatives() -> None:
    """One row a token, in the tokens' order."""
    (ended,) = added([sequence(0, 1, width=2)], [sequence(0, 2, width=2)]).sequences
    assert ended.logprobs == Logprobs([-1, -2], [1, 2], 2, [0, 1, 0, 1], [0.0, -1.0, 0.0, -1.0])
    assert ended.logprobs.alternatives(1) == [(0, 0.0), (1, -1.0)]


def test_each_position_has_its_own_alternatives() -> None:
    """As many as were asked for, which may be none: then there are log-probabilities still."""
    logprobs = Logprobs([-1, -2, -3], [1, 1, 1], 3, list(range(9)), [-float(i) for i in range(9)])
    assert [logprobs.alternatives(position) for position in range(3)] == [
        [(0, 0.0), (1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0), (5, -5.0)], [(6, -6.0), (7, -7.0), (8, -8.0)],
    ]  # fmt: skip
    token = generation_pb2.SequenceDelta(logprobs=types_pb2.Logprobs(sampled=[-1], ranks=[1]))
    (ended,) = added([token], [token]).sequences
    assert ended.logprobs == Logprobs([-1, -1], [1, 1], 0, [], [])
    assert ended.logprobs.alternatives(1) == []


def test_what_is_told_once_stays() -> None:
    """Id and prompt come with the first message, usage with the last."""
    generation = Generation()
    first = generation_pb2.GenerateResponse(request_id="r", prompt=generation_pb2.Prompt(num_tokens=3))
    last = generation_pb2.GenerateResponse(usage=generation_pb2.Usage(num_output_tokens=2))
    for message in (first, generation_pb2.GenerateResponse(), last, generation_pb2.GenerateResponse()):
        generation.add(Delta(message))
    assert generation.request_id == "r"
    assert generation.prompt is not None and generation.prompt.num_tokens == 3
    assert generation.usage is not None and generation.usage.num_output_tokens == 2


def test_the_text_of_a_delta_is_that_of_the_first_sequence() -> None:
    """As that of a generation."""
    delta = Delta(generation_pb2.GenerateResponse(outputs=[sequence(1, 1), sequence(0, 2), sequence(0, 3)]))
    assert delta.text == "<2><3>"
    assert repr(delta).startswith("Delta(outputs {") and repr(delta.outputs[0]).startswith("SequenceDelta(index: 1")
    assert "\n" not in repr(delta) + repr(delta.outputs[0])
