"""Which bytes are there: a set of [start, end) ranges. Pure."""

from bisect import bisect_left, bisect_right


class ByteRanges:
    """A set of bytes, kept as sorted ranges that neither overlap nor touch. Adding costs O(log n) to find the place and
    a move of the list's tail to make it, for n ranges; chunks that arrive in order make one range."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._total = 0

    def add(self, start: int, end: int) -> int:
        """Adds [start, end); how many of its bytes are new. Raises ValueError unless 0 <= start <= end."""
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is no range")
        if start == end:
            return 0
        # Those that overlap or touch: their end is not before our start, their start not after our end.
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        merged_start, merged_end = start, end
        if first < last:
            merged_start = min(start, self._starts[first])
            merged_end = max(end, self._ends[last - 1])
        replaced = sum(self._ends[i] - self._starts[i] for i in range(first, last))
        self._starts[first:last] = [merged_start]
        self._ends[first:last] = [merged_end]
        new = merged_end - merged_start - replaced
        self._total += new
        return new

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not there, in order."""
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

    def missing(self, total: int) -> list[tuple[int, int]]:
        """The parts of [0, total) that are not there, in order."""
        return self.gaps(0, total)

    @property
    def total(self) -> int:
        """How many bytes are there."""
        return self._total

    @property
    def num_ranges(self) -> int:
        """Of how many ranges the set consists."""
        return len(self._starts)
