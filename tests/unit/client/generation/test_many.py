"""What a client keeps to read rows of tokens, while their request runs."""

import pytest
from google.rpc import status_pb2

from genserve.client.generation.many import Sequences
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2, types_pb2
from tests.support.kept import kept
from tests.support.refusals import refuses

LAST = generation_pb2.GenerateResponse(usage=generation_pb2.Usage())


@pytest.mark.parametrize(
    "end",
    [
        generation_pb2.GenerateManyItem(request_id="r", error=status_pb2.Status()),
        generation_pb2.GenerateManyItem(request_id="r", response=LAST),
        None,
    ],
    ids=["an error", "its last tokens", "a failure that no replica tells"],
)
def test_nothing_is_kept_of_a_request_that_has_ended(end: generation_pb2.GenerateManyItem | None) -> None:
    """A stream may be open for weeks. Its slots are the next request's, or nobody's."""
    sequences = Sequences()
    before = len(kept(sequences))
    first = generation_pb2.GenerateResponse(outputs=[generation_pb2.SequenceDelta(index=0, token_ids=[1])])
    sequences.note(generation_pb2.GenerateManyItem(request_id="r", slots=[0, 1], response=first))
    row = generation_pb2.TokenColumns(slots=[1], token_ids=[7])
    assert [request_id for request_id, _ in sequences.deltas(row)] == ["r"]
    if end is None:
        sequences.forget("r")
    else:
        sequences.note(end)
    assert len(kept(sequences)) == before
    with refuses(GenserveError):
        list(sequences.deltas(row))


def test_rows_of_a_sequence_without_an_item_begin_at_its_first_token() -> None:
    """A request's first item has the sequences that were first."""
    sequences = Sequences()
    span = types_pb2.WeightSpan(version=3, start=0, end=2)
    first = generation_pb2.SequenceDelta(index=0, token_ids=[1, 2], weight_spans=[span])
    response = generation_pb2.GenerateResponse(outputs=[first])
    sequences.note(generation_pb2.GenerateManyItem(request_id="r", slots=[4, 5], response=response))
    rows = generation_pb2.TokenColumns(slots=[4, 5], token_ids=[7, 8], weight_version=3)
    ((_, delta),) = sequences.deltas(rows)
    assert [output.weight_spans[0].start for output in delta.outputs] == [2, 0]
