"""What a fleet may serve, by the writes that were made to it: one after the other, as one trainer makes them. Pure.

A fleet commits on all replicas at nearly the same time, not at one moment. So a value may be read from the moment on in
which its write was asked for. It is over when a later write was answered with success, as one write at a time is on its
way. A write whose answer is unknown may never come about, but not after the success of a later one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetWrite:
    """Any of these values may have been written. `ended_s`: its client went on, whatever it was told. `settled_s`: from
    then on what was written before is over; inf = that is not known."""

    values: frozenset[int]
    invoked_s: float
    ended_s: float
    settled_s: float = math.inf


class FleetRegister:
    """Starts with 0."""

    def __init__(self, writes: Iterable[FleetWrite]) -> None:
        self._writes = [FleetWrite(frozenset({0}), -math.inf, -math.inf, -math.inf), *writes]
        self._over_s = [self._over(write) for write in self._writes]

    def _over(self, write: FleetWrite) -> float:
        later = (each.settled_s for each in self._writes if each.invoked_s >= write.ended_s and each is not write)
        return min(later, default=math.inf)

    def asked_s(self, value: int) -> float:
        """When somebody first asked for it; inf = never."""
        return min((write.invoked_s for write in self._writes if value in write.values), default=math.inf)

    def may_be(self, value: int, from_s: float, to_s: float) -> bool:
        """Whether it may have been there at some time between."""
        return bool(self._possible(value, from_s, to_s))

    def goes_back(self, values: Sequence[int], from_s: float, to_s: float) -> bool:
        """Whether what was read one after the other contradicts the order of the writes."""
        latest_s = -math.inf
        for value in values:
            possible = [
                write
                for write in self._possible(value, from_s, to_s)
                if write.invoked_s >= latest_s or write.ended_s > latest_s
            ]
            if not possible:
                return True
            latest_s = max(latest_s, min(write.invoked_s for write in possible))
        return False

    def values(self) -> frozenset[int]:
        """All that may ever have been there."""
        return frozenset().union(*(write.values for write in self._writes))

    def _possible(self, value: int, from_s: float, to_s: float) -> list[FleetWrite]:
        return [
            write
            for write, over_s in zip(self._writes, self._over_s, strict=True)
            if value in write.values and write.invoked_s <= to_s and over_s > from_s
        ]
