"""Time that passes only while the event loop has nothing to do, and then leaps to the next timer: a machine that stands
still takes none of it. For code that waits for timers and other tasks, and talks to nobody."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def leaping_clock() -> Iterator[None]:
    """The clock of the running loop inside the block. Tasks that wait for a timer are to end within it."""
    loop: Any = asyncio.get_running_loop()
    now_s, selector = loop.time(), loop._selector
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
