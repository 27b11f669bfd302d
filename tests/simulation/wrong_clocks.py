"""Hosts whose wall clocks are wrong, and are set while programs run. Their monotonic clocks are right."""

import random
from collections.abc import Sequence

from tests.simulation.events import Events
from tests.simulation.virtual_time import WallClock

_AHEAD_S = (0.0, 0.3, 5.0, 60.0, 300.0)
MOST_JUMP_S = 2 * _AHEAD_S[-1]
"""A lease that is handed on while a clock is set may last so much longer."""


class WrongClocks:
    """Those of all hosts of a fleet."""

    def __init__(self, drawn: random.Random, events: Events, clocks: Sequence[WallClock]) -> None:
        self._drawn = drawn
        self._events = events
        self._clocks = clocks
        for each in clocks:
            self._set(each)

    async def jump(self) -> None:
        """One of them is set: right, or to another wrong time."""
        number = self._drawn.randrange(len(self._clocks))
        self._set(self._clocks[number])
        self._events.note("clock", number, f"{self._clocks[number].ahead_s:.3f}")

    def _set(self, clock: WallClock) -> None:
        clock.ahead_s = self._drawn.choice(_AHEAD_S) * (2 * self._drawn.random() - 1)
