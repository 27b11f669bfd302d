"""How often measured values were how large: counted where they are measured, and read by whoever exposes them."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Values by size. `counts` has one number for each of the `bounds`, which are upper ones and ascend, and one for
    larger values. Use it on one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds must ascend, are {list(bounds)}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
