"""Updates leave the daemon whole."""

from google.protobuf import json_format

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.rpc.convert.generation_response import to_response
from genserve.v1 import generation_pb2


def delta(**fields: object) -> SequenceDelta:
    """A delta of one token."""
    return SequenceDelta(**{"index": 0, "token_ids": [7], "text": "a", "logprobs": None, "weight_spans": [],
                            "finish": None, **fields})  # type: ignore[arg-type]  # fmt: skip


def finish(reason: FinishReason, stop: int | str | None = None) -> generation_pb2.Finish:
    """The message for an end."""
    update = GenerationUpdate(None, [delta(finish=Finish(reason, stop, 1, [], None))], None)
    return to_response(update, "r").outputs[0].finish


def test_a_delta_in_the_middle_carries_only_what_is_new() -> None:
    """No id, no prompt, no usage, no end: the bytes that every token costs."""
    update = GenerationUpdate(
        None, [delta(index=1, token_ids=[4, 5], text="hi", weight_spans=[WeightSpan(3, 8, 10)])], None
    )
    assert json_format.MessageToDict(to_response(update, "r")) == {
        "outputs": [
            {"index": 1, "tokenIds": [4, 5], "text": "hi", "weightSpans": [{"version": 3, "start": 8, "end": 10}]}
        ]
    }


def test_the_first_message_tells_id_and_prompt_and_the_last_usage() -> None:
    """Also when the prompt's details were not asked for and nothing was cached."""
    update = GenerationUpdate(PromptInfo(3, 0, None, None), [], Usage(3, 0, 0))
    response = to_response(update, "r1")
    assert response.request_id == "r1"
    assert response.HasField("prompt") and response.prompt.num_tokens == 3
    assert not response.prompt.HasField("logprobs") and not response.prompt.token_ids
    assert response.HasField("usage") and response.usage.num_prompt_tokens == 3


def test_zero_usage_is_still_the_last_message() -> None:
    """A client knows the last message by its usage."""
    assert to_response(GenerationUpdate(None, [], Usage(0, 0, 0)), "r").HasField("usage")


def test_logprobs_are_columns_row_by_row() -> None:
    """Those of the prompt and those of the output alike."""
    columns = LogprobColumns([-0.5, -1.5], [1, 2], 2, [1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.0])
    response = to_response(
        GenerationUpdate(PromptInfo(3, 1, [9, 8, 7], columns), [delta(logprobs=columns)], Usage(3, 1, 1)), "r"
    )
    for message in (response.prompt.logprobs, response.outputs[0].logprobs):
        assert list(message.sampled) == [-0.5, -1.5]
        assert list(message.ranks) == [1, 2]
        assert message.width == 2
        assert list(message.token_ids) == [1, 2, 3, 4]
        assert list(message.values) == [-0.5, -1.0, -1.5, -2.0]
    assert list(response.prompt.token_ids) == [9, 8, 7]


def test_logprobs_of_the_sampled_token_alone_have_no_width() -> None:
    """Which is not the same as none at all."""
    response = to_response(GenerationUpdate(None, [delta(logprobs=LogprobColumns([-1.0], [1], 0, [], []))], None), "r")
    assert response.outputs[0].HasField("logprobs") and response.outputs[0].logprobs.width == 0


def test_every_reason_has_its_value() -> None:
    """Names on the wire are those inside."""
    for reason in FinishReason:
        name = generation_pb2.FinishReason.Name(finish(reason).reason)
        assert name == f"FINISH_REASON_{reason.name}"
    assert len(FinishReason) == len(generation_pb2.FinishReason.values()) - 1


def test_what_stopped_a_sequence_is_token_or_string() -> None:
    """Token 0 and nothing are not the same."""
    assert finish(FinishReason.STOP_TOKEN, 0).WhichOneof("stop") == "stop_token_id"
    assert finish(FinishReason.STOP_STRING, "END").stop_string == "END"
    assert finish(FinishReason.EOS).WhichOneof("stop") is None


def test_the_end_has_the_whole_sequence_s_spans_and_sum() -> None:
    """A sum of zero was asked for; None was not."""
    ended = Finish(FinishReason.LENGTH, None, 6, [WeightSpan(0, 0, 2), WeightSpan(1, 2, 6, 4)], 0.0)
    message = to_response(GenerationUpdate(None, [delta(finish=ended)], None), "r").outputs[0].finish
    told = [(span.version, span.start, span.end, span.lora_version) for span in message.weight_spans]
    assert told == [(0, 0, 2, 0), (1, 2, 6, 4)]
    assert message.num_tokens == 6
    assert message.HasField("cumulative_logprob")
    assert not finish(FinishReason.LENGTH).HasField("cumulative_logprob")
