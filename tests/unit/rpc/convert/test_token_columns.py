"""Rows of columns: what may be one, what it counts, and the numbers of sequences."""

from dataclasses import replace

import pytest
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
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.token_columns import MAX_FIRST_SLOT, ColumnsOfStep, Slots, first_slot
from genserve.v1 import generation_pb2
from genserve.wire.literals import FIRST_SLOT_KEY
from tests.support.refusals import refuses

LOGPROBS = LogprobColumns([-1.0, -2.0], [1, 2], 1, [8, 9], [-0.5, -0.25])
ROW = SequenceDelta(0, [5, 6], "abc", LOGPROBS, [WeightSpan(3, 4, 6)], None)
"""Two tokens with one alternative each."""


def filled(columns: ColumnsOfStep) -> list[dict[str, object]]:
    """What is sent."""
    response = generation_pb2.GenerateManyResponse()
    columns.fill(response)
    return [json_format.MessageToDict(each) for each in response.columns]


def test_rows_of_one_kind_are_columns_side_by_side() -> None:
    """In the order in which they came, with all that a delta says."""
    columns = ColumnsOfStep()
    one = replace(ROW, token_ids=[7], text="", weight_spans=[WeightSpan(3, 0, 1)],
                  logprobs=LogprobColumns([-4.0], [4], 1, [2], [-0.125]))  # fmt: skip
    assert columns.add([9], GenerationUpdate(None, [ROW], None))
    assert columns.add([4], GenerationUpdate(None, [one], None))
    assert filled(columns) == [
        {
            "slots": [9, 4],
            "weightVersion": 3,
            "numTokens": [2, 1],
            "tokenIds": [5, 6, 7],
            "texts": ["abc", ""],
            "logprobs": {
                "sampled": [-1.0, -2.0, -4.0],
                "ranks": [1, 2, 4],
                "width": 1,
                "tokenIds": [8, 9, 2],
                "values": [-0.5, -0.25, -0.125],
            },
        }
    ]


def test_the_sequences_of_a_request_have_a_row_each() -> None:
    """By their index, which is not their place in the update."""
    columns = ColumnsOfStep()
    deltas = [replace(ROW, index=2), replace(ROW, index=0)]
    assert columns.add([7, 8, 9], GenerationUpdate(None, deltas, None))
    assert [each["slots"] for each in filled(columns)] == [[9, 7]]


def test_what_rows_of_one_kind_share_is_told_once() -> None:
    """Another version, another width, no log-probabilities or no token ids is another kind."""
    columns = ColumnsOfStep()
    for row in (
        ROW,
        replace(ROW, weight_spans=[WeightSpan(4, 4, 6)]),
        replace(ROW, logprobs=LogprobColumns([-1.0, -2.0], [1, 2], 0, [], [])),
        replace(ROW, logprobs=None),
        replace(ROW, token_ids=()),
        ROW,
    ):
        assert columns.add([0], GenerationUpdate(None, [row], None))
    assert [len(each["slots"]) for each in filled(columns)] == [2, 1, 1, 1, 1]  # type: ignore[arg-type]


FINISH = Finish(FinishReason.LENGTH, None, 6, [WeightSpan(3, 0, 6)], None)


@pytest.mark.parametrize(
    "update",
    [
        GenerationUpdate(PromptInfo(1, 0, None, None), [ROW], None),
        GenerationUpdate(None, [ROW], Usage(1, 0, 6)),
        GenerationUpdate(None, [], None),
        GenerationUpdate(None, [replace(ROW, finish=FINISH)], None),
        GenerationUpdate(None, [replace(ROW, weight_spans=[])], None),
        GenerationUpdate(None, [replace(ROW, weight_spans=[WeightSpan(3, 4, 5), WeightSpan(4, 5, 6)])], None),
        GenerationUpdate(None, [replace(ROW, token_ids=[5])], None),
        GenerationUpdate(None, [replace(ROW, logprobs=LogprobColumns([-1.0], [1], 0, [], []))], None),
        GenerationUpdate(None, [ROW, replace(ROW, index=1, finish=FINISH)], None),
        GenerationUpdate(None, [ROW, replace(ROW, index=1, weight_spans=[WeightSpan(4, 4, 6)])], None),
    ],
)
def test_what_columns_cannot_say_is_no_row(update: GenerationUpdate) -> None:
    """And leaves none behind: it is an item."""
    columns = ColumnsOfStep()
    assert not columns.add([0, 1], update)
    assert filled(columns) == []


def test_the_smallest_free_numbers_are_taken() -> None:
    """So that each has one byte. Those that a message frees are free in the next one."""
    slots = Slots()
    assert (slots.take(3), slots.take(1)) == ([0, 1, 2], [3])
    slots.free([1, 0])
    assert slots.take(1) == [4]
    slots.end_message()
    assert slots.take(3) == [0, 1, 5]
    slots.free([3])
    slots.end_message()
    slots.free([2])
    slots.end_message()
    assert slots.take(2) == [2, 3]


def test_numbers_begin_where_they_are_told_to_and_end_there() -> None:
    """Who has none gets none of them, and leaves what there is to others."""
    slots = Slots(10, 3)
    assert (slots.take(2), slots.take(2), slots.take(1), slots.take(1)) == ([10, 11], [], [12], [])
    slots.free([11])
    slots.end_message()
    assert slots.take(1) == [11]


def test_the_first_number_is_a_slot() -> None:
    """So that all of a call's are."""
    assert first_slot([]) == first_slot([("other", "7")]) == 0
    assert first_slot([("other", b"7"), (FIRST_SLOT_KEY, str(MAX_FIRST_SLOT))]) == MAX_FIRST_SLOT
    for wrong in ("", "-1", "1.5", "x", "²", str(MAX_FIRST_SLOT + 1), "9" * 5000, b"7"):
        with refuses(InvalidFieldError, says=FIRST_SLOT_KEY):
            first_slot([(FIRST_SLOT_KEY, wrong)])
