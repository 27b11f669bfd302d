"""Spans of a delta out of the starts that vLLM keeps."""

from hypothesis import given
from hypothesis import strategies as st

from genserve.engine.generation import WeightSpan
from genserve.engine.vllm.requests.weight_spans import INITIAL_LABEL, spans_between, version_of

STARTS = [(INITIAL_LABEL, 0), ("3", 4), ("4", 9)]


def test_a_delta_within_one_version_has_one_span() -> None:
    """The label of the first weights is version 0."""
    assert spans_between(STARTS, 1, 3) == [WeightSpan(0, 1, 3)]
    assert version_of(INITIAL_LABEL) == 0


def test_a_merged_delta_across_a_push_is_split_where_the_push_was() -> None:
    """A slow reader gets one delta of many steps; its tokens keep their versions."""
    assert spans_between(STARTS, 2, 12) == [WeightSpan(0, 2, 4), WeightSpan(3, 4, 9), WeightSpan(4, 9, 12)]


def test_every_span_of_a_request_names_its_adapter() -> None:
    """A push of weights does not change it."""
    assert {span.lora_version for span in spans_between(STARTS, 2, 12, 5)} == {5}
    assert spans_between(STARTS, 1, 3, 5) == [WeightSpan(0, 1, 3, 5)]


def test_a_delta_before_a_later_version_does_not_name_it() -> None:
    """vLLM may have begun the next version before an older delta is read."""
    assert spans_between(STARTS, 0, 4) == [WeightSpan(0, 0, 4)]


def test_a_version_without_tokens_leaves_no_span() -> None:
    """Two pushes in a row, and a delta without tokens."""
    assert spans_between([("1", 0), ("2", 5), ("3", 5)], 4, 6) == [WeightSpan(1, 4, 5), WeightSpan(3, 5, 6)]
    assert spans_between(STARTS, 4, 4) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 10))
def test_spans_cover_a_delta_exactly_once(lengths: list[int], start: int, size: int) -> None:
    """Every token of the delta has exactly the version whose start is the last at or before it."""
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    starts = [(str(i + 1), first) for i, first in enumerate(firsts)]
    spans = spans_between(starts, start, start + size)
    labelled = {i: span.version for span in spans for i in range(span.start, span.end)}
    assert labelled == {i: sum(first <= i for first in firsts) for i in range(start, start + size)}
    assert sum(span.end - span.start for span in spans) == size
