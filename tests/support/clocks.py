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

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._monotonic = time.monotonic

    def now_s(self) -> float:
        """What the loop's clock and time.monotonic say."""
        return self._monotonic() + self._ahead_s

    async def advance(self, seconds: float) -> None:
        """Lets everything run that is ready, then time pass, and then everything run that is due."""
        await turns()
        self._ahead_s += seconds
        await turns()

    async def advance_until(self, holds: Callable[[], object], step_s: float) -> None:
        """Lets time pass, `step_s` by `step_s`, until `holds` is true; between two steps sockets have a little time."""
        while not holds():
            await asyncio.sleep(0.01)
            await self.advance(step_s)


@contextmanager
def advanced_clock() -> Iterator[AdvancedClock]:
    """Real time, which the test sets forward. For code that also talks to others: sockets take the time that they take,
    and gRPC's own deadlines and keep-alive are not set forward. What has kept a reference to time.monotonic itself is
    not either."""
    loop: Any = asyncio.get_running_loop()
    clock = AdvancedClock()
    real = time.monotonic
    loop.time = time.monotonic = clock.now_s
    try:
        yield clock
    finally:
        time.monotonic = real
        del loop.time
