"""Byte ranges against a set of integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.tensors.ranges import ByteRanges

SIZE = 40
RANGES = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(RANGES, max_size=30), RANGES)
def test_ranges_are_a_set_of_bytes(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    """For any additions: new bytes, total, missing and gaps are those of a naive set, and the ranges kept are
    as few as possible."""
    ranges, naive = ByteRanges(), set[int]()
    for start, end in added:
        new = set(range(start, end)) - naive
        assert ranges.add(start, end) == len(new)
        naive |= new
    assert ranges.total == len(naive)
    assert ranges.missing(SIZE) == _runs(set(range(SIZE)) - naive)
    assert ranges.gaps(*asked) == _runs(set(range(*asked)) - naive)
    assert ranges.num_ranges == len(_runs(naive))


def _runs(numbers: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2)])
def test_what_is_no_range_is_refused(start: int, end: int) -> None:
    """Silently adding it would count bytes that do not exist."""
    with pytest.raises(ValueError, match="no range"):
        ByteRanges().add(start, end)


def test_a_long_push_in_order_is_one_range() -> None:
    """A gigabyte in chunks of a mebibyte costs no memory for its bookkeeping."""
    ranges = ByteRanges()
    for start in range(0, 1 << 30, 1 << 20):
        ranges.add(start, start + (1 << 20))
    assert ranges.num_ranges == 1
    assert ranges.total == 1 << 30
