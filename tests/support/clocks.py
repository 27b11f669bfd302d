"""Clocks for tests in which time is the point: leases that expire, peers that fall silent, deadlines that pass.

A test that waits for real seconds is slow, and one that makes them short (a lease of 0.05 s) fails on a machine that
stands still for longer. With these it says what the user would: a lease of 600 s, and then that 601 s pass.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.patience import turns


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
        self._now_s = time.monotonic()
        self._select = select
        self._waits: tuple[float, float] | None = None

    def now_s(self) -> float:
        """What the loop's clock and time.monotonic say."""
        return self._now_s + self._waited_s()

    def select(self, timeout_s: float | None = None) -> Any:
        """The loop waits, for what happens or for its next timer: time passes, but not beyond that timer."""
        self._waits = self._real_s(), math.inf if timeout_s is None else max(timeout_s, 0.0)
        try:
            return self._select(timeout_s)
        finally:
            self._now_s, self._waits = self.now_s(), None

    def _waited_s(self) -> float:
        if (waits := self._waits) is None:
            return 0.0
        began_s, longest_s = waits
        return min(self._real_s() - began_s, longest_s)

    async def advance(self, seconds: float) -> None:
        """Lets everything run that is ready, then time pass, and then everything run that is due."""
        await turns()
        self._now_s += seconds
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
