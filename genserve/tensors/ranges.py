"""Which bytes are there: sets of [start, end) ranges. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""Bytes [start, end)."""


class ByteRanges:
    """A set of bytes, stored as sorted ranges that neither overlap nor touch.

    For n ranges, adding costs O(log n) to find the place and a move of the list's tail. Chunks that arrive in order
    form one range. Only `add` changes the attributes.
    """

    def __init__(self) -> None:
        self.total = 0
        """The number of bytes in the set."""
        self.prefix = 0
        """The number of bytes from 0 on without a gap."""
        self.end = 0
        """The end of the last range; 0 without any."""
        self.num_ranges = 0
        """The number of ranges in the set."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> int:
        """Adds [start, end) and returns how many of its bytes are new. Raises ValueError unless 0 <= start <= end."""
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is not a range")
        if start == end:
            return 0
        # The ranges that overlap or touch: their end is not before this start, their start not after this end.
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        merged_start, merged_end = start, end
        if first < last:
            merged_start = min(start, self._starts[first])
            merged_end = max(end, self._ends[last - 1])
        replaced = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [merged_start]
        self._ends[first:last] = [merged_end]
        new = merged_end - merged_start - replaced
        self.total += new
        self.end = self._ends[-1]
        self.num_ranges = len(self._starts)
        if merged_start == 0:
            self.prefix = merged_end
        return new

    def gaps(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are missing, in order."""
        gaps = []
        position = start
        for index in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[index] >= end:
                break
            if self._starts[index] > position:
                gaps.append((position, self._starts[index]))
            position = self._ends[index]
        if position < end:
            gaps.append((position, end))
        return gaps

    def first_in(self, start: int, end: int) -> Range | None:
        """The first part of [start, end) that is in the set; None if nothing of it is."""
        index = bisect_right(self._ends, start)
        if index == len(self._starts) or self._starts[index] >= end:
            return None
        return max(start, self._starts[index]), min(end, self._ends[index])

    def missing(self, total: int) -> list[Range]:
        """The parts of [0, total) that are missing, in order."""
        return self.gaps(0, total)


def num_bytes(ranges: Iterable[Range]) -> int:
    """How many bytes ranges without overlaps have together."""
    return sum(end - start for start, end in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in order; adjacent ones are joined and empty ones are left out."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined


def common(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """The bytes that are in both; each is in order and without overlaps."""
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        (a, b), (c, d) = one[i], other[j]
        if max(a, c) < min(b, d):
            shared.append((max(a, c), min(b, d)))
        if b < d:
            i += 1
        else:
            j += 1
    return merged(shared)


def split(ranges: Sequence[Range], num_parts: int) -> list[list[Range]]:
    """Splits the ranges into `num_parts` parts of about the same number of bytes; some are empty if there are few
    bytes."""
    total_bytes = num_bytes(ranges)
    cuts = [total_bytes * part // num_parts for part in range(num_parts + 1)]
    parts: list[list[Range]] = []
    for low, high in pairwise(cuts):
        part, position = [], 0
        for start, end in ranges:
            first, last = max(start, start + low - position), min(end, start + high - position)
            if first < last:
                part.append((first, last))
            position += end - start
        parts.append(part)
    return parts
