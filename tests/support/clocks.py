"""Clocks for tests in which time is the point: leases that expire, peers that fall silent, deadlines that pass.

A test that waits for real seconds is slow, and one that makes them short (a lease of 0.05 s) fails on a machine that
stands still for longer. With these it says what the user would: a lease of 600 s, and then that 601 s pass.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.support.patience import turns

_BEYOND_S: Final = 1e-6
"""The loop takes a timer for due only when its time is over, by more than a machine can tell that runs for months."""


@contextmanager
def leaping_clock() -> Iterator[None]:
    """Time passes only while the running event loop has nothing to do, and then leaps to the next timer: a machine that
    stands still takes none of it. For code that waits for timers and other tasks, and talks to nobody. Tasks that wait
    for a timer are to end within the block."""
    loop: Any = asyncio.get_running_loop()
    now_s = float(math.floor(loop.time()))  # whole, so that a life of 60 s is not a rounding error shorter
    selector = loop._selector
    select = selector.select

    def leap(timeout_s: float | None = None) -> Any:
        nonlocal now_s
        if timeout_s is None:
            return select()
        if not (happened := select(0)):
            now_s += timeout_s
        return happened

    loop.time, selector.select = lambda: now_s, leap
    try:
        yield
    finally:
        del loop.time, selector.select


class AdvancedClock:
    """`advance` lets seconds pass at once, for the running event loop and for time.monotonic. See `advanced_clock`."""

    def __init__(self, select: Callable[[float | None], Any]) -> None:
        self._real_s = time.monotonic
        self._select = select
        self._at = time.monotonic(), 0.0, 0.0
        """What it says, when the loop began to wait, and for how long at most. One value: other threads read it."""

    def now_s(self) -> float:
        """What the loop's clock and time.monotonic say."""
        now_s, began_s, longest_s = self._at
        return now_s + min(self._real_s() - began_s, longest_s)

    def select(self, timeout_s: float | None = None) -> Any:
        """The loop waits, for what happens or for its next timer: time passes, but hardly beyond that timer."""
        longest_s = math.inf if timeout_s is None else max(timeout_s, 0.0) + _BEYOND_S
        self._at = self.now_s(), self._real_s(), longest_s
        try:
            return self._select(timeout_s)
        finally:
            self._at = self.now_s(), 0.0, 0.0

    async def advance(self, seconds: float) -> None:
        """Lets everything run that is ready, then time pass, and then everything run that is due."""
        await turns()
        self._at = self.now_s() + seconds, 0.0, 0.0
        await turns()

    async def advance_until(self, holds: Callable[[], object], step_s: float) -> None:
        """Lets time pass, `step_s` by `step_s`, until `holds` is true; between two steps sockets have a little time."""
        while not holds():
            await asyncio.sleep(0.01)
            await self.advance(step_s)


@contextmanager
def advanced_clock() -> Iterator[AdvancedClock]:
    """Real time, which the test sets forward. It passes only while the running event loop waits: a machine that stands
    still takes none of it. For code that also talks to others: sockets take the time that they take, and gRPC's own
    deadlines and keep-alive are not set forward. What has kept a reference to time.monotonic itself is not either."""
    loop: Any = asyncio.get_running_loop()
    selector = loop._selector
    clock = AdvancedClock(selector.select)
    real = time.monotonic
    loop.time = time.monotonic = clock.now_s
    selector.select = clock.select
    try:
        yield clock
    finally:
        time.monotonic = real
        del loop.time, selector.select
