"""For how long generation stood still: whether it does now, and the lengths of the pauses so far."""

import time
from collections.abc import Callable

from genserve.observe.histogram import Histogram

_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Standstill:
    """`lengths`: of the pauses that have ended, in seconds, whoever asked for them. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lengths = Histogram(_BOUNDS_S)
        self._clock = clock
        self._since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether nothing is scheduled now."""
        return self._since_s is not None

    @property
    def seconds(self) -> float:
        """For how long it has lasted, 0 if generation runs."""
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    def set(self, *, on: bool) -> None:
        """It begins or ends now, unless it has before."""
        if on and self._since_s is None:
            self._since_s = self._clock()
        elif not on and self._since_s is not None:
            self.lengths.add(self.seconds)
            self._since_s = None
