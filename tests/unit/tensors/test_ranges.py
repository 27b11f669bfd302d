"""Byte ranges against a set of integers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.tensors.ranges import ByteRanges, common, merged, num_bytes, split

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
    runs = _runs(naive)
    assert ranges.num_ranges == len(runs)
    assert ranges.prefix == (runs[0][1] if 0 in naive else 0)
    assert ranges.end == max(naive, default=-1) + 1


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
    with pytest.raises(ValueError, match=str(start)):
        ByteRanges().add(start, end)


def test_a_long_push_in_order_is_one_range() -> None:
    """A gigabyte in chunks of a mebibyte costs no memory for its bookkeeping."""
    ranges = ByteRanges()
    for start in range(0, 1 << 30, 1 << 20):
        ranges.add(start, start + (1 << 20))
    assert ranges.num_ranges == 1
    assert ranges.total == 1 << 30


def test_splitting_shares_every_byte_out_once() -> None:
    """In parts that differ by a byte at most, whatever the holes."""
    rng = random.Random(1)
    for _ in range(200):
        points = sorted(rng.sample(range(1000), 2 * rng.randint(0, 6)))
        ranges = list(zip(points[::2], points[1::2], strict=True))
        parts = split(ranges, num_parts := rng.randint(1, 7))
        every = sorted(byte for part in parts for start, end in part for byte in range(start, end))
        assert every == [byte for start, end in ranges for byte in range(start, end)]
        sizes = [num_bytes(part) for part in parts]
        assert len(parts) == num_parts
        assert max(sizes) - min(sizes) <= 1


def test_ranges_in_common() -> None:
    """What a caller still has to send of what is missing."""
    assert common([(0, 5), (8, 20)], [(3, 9), (15, 16), (20, 30)]) == [(3, 5), (8, 9), (15, 16)]
    assert merged([(0, 2), (2, 4), (4, 4), (6, 7)]) == [(0, 4), (6, 7)]
