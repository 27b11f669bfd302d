"""Parts for asyncio that the standard library lacks: waits that grow, cancellation, an event that happens again and
again, and a limit of how long the other side of a stream may be silent."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final


@dataclass(slots=True)
class Backoff:
    """The first wait takes `first_s`, and each one after it twice as long as the one before, up to `longest_s`."""

    first_s: float
    longest_s: float
    _next_s: float | None = None

    def next_s(self) -> float:
        """The wait before the next attempt."""
        wait_s = self.first_s if self._next_s is None else self._next_s
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s

    def reset(self) -> None:
        """An attempt has succeeded: the next wait is the first one again."""
        self._next_s = None


def is_cancelled() -> bool:
    """Whether the running task was asked to end.

    A function that raises must not keep the task in a variable: the task has the error, whose traceback has the frame,
    which would have the task. Such a cycle keeps calls, and with them connections, until garbage is collected.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_all(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Asks tasks to end, and returns when they have, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Change:
    """Wakes every task that waits when `notify` is called. A task that waits later waits for the next call."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.is_awaited = False
        """Whether a task waits for the next change, so that a caller with very many changes can leave out `notify`."""

    def notify(self) -> None:
        """Wakes every task that waits now."""
        self.is_awaited = False
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next `notify`. Take it, look at the state, then wait: a change in between is not lost."""
        self.is_awaited = True
        return self._next

    async def wait(self) -> None:
        """Returns at the next `notify`."""
        self.is_awaited = True
        await self._next.wait()


_PARTS: Final = 4


@asynccontextmanager
async def silence(limit_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError if the body takes longer. Only time in which the event loop ran counts.

    A process that stood still for seconds, as on a busy host, has not listened: the word that it waits for may have
    come meanwhile. So the time is counted in parts, each of which begins when the loop runs: a stop of any length
    counts as one part.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        timer = loop.call_later(limit_s / _PARTS, lambda: passed(1))

        def passed(parts: int) -> None:
            nonlocal timer
            if parts == _PARTS:
                timeout.reschedule(loop.time())
            else:
                timer = loop.call_later(limit_s / _PARTS, passed, parts + 1)

        try:
            yield
        finally:
            timer.cancel()
