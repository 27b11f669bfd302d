"""Which messages of a replica need no reading."""

from hypothesis import given
from hypothesis import strategies as st

from genserve.forward.leg import has_only_columns
from genserve.v1 import generation_pb2

responses = st.builds(
    lambda items, columns: generation_pb2.GenerateManyResponse(
        items=[generation_pb2.GenerateManyItem(request_id=each) for each in items],
        columns=[generation_pb2.TokenColumns(slots=slots, token_ids=slots) for slots in columns],
    ),
    st.lists(st.text(max_size=5), max_size=2),
    st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=200), max_size=3),
)


@given(responses)
def test_a_message_without_items_tells_of_no_end(response: generation_pb2.GenerateManyResponse) -> None:
    """Whatever its columns are."""
    assert has_only_columns(response.SerializeToString()) == (not response.items)


@given(responses, st.binary(max_size=20))
def test_what_is_cut_or_goes_on_otherwise_is_read(response: generation_pb2.GenerateManyResponse, tail: bytes) -> None:
    """The parser decides then."""
    frame = response.SerializeToString()
    assert not has_only_columns(frame + b"\x1a" + tail)
    if frame and not response.items:
        assert not has_only_columns(frame + b"\x12")
