"""The time that a client may take to make room for a message of a stream.

gRPC lets a writer wait for ever for a client that does not read. One timer looks at all writes of a server, now and
then, because a timer for each write would cost as much as a short message.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from genserve.errors import DeadlineError

T = TypeVar("T")

_LOOKS = 8
"""Within the time: a write ends late by an eighth of it at most."""


class WriteDeadline:
    """Of all streams of a server. `timeout_s` 0 = a write may take any time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._look_number = 0
        self._begun: dict[asyncio.Task[Any], int] = {}  # the number of the look before
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, write: Callable[[T], Awaitable[None]], message: T) -> None:
        """Writes, as `write` does. Raises DeadlineError if the client does not read for so long."""
        task = asyncio.current_task()
        if task is None or not self._timeout_s:
            return await write(message)
        self._begun[task] = self._look_number
        if self._timer is None:
            self._look_later()
        num_cancelling = task.cancelling()
        try:
            await write(message)
        except asyncio.CancelledError:
            # Another cancellation may have come as well, and counts.
            if task in self._late and task.uncancel() <= num_cancelling:
                raise DeadlineError(f"the client did not read for {self._timeout_s:g} s") from None
            raise
        finally:
            del self._begun[task]
            if self._late:
                self._late.discard(task)
            del task  # see genserve.aio

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        self._look_number += 1
        for task, number in self._begun.items():
            if self._look_number - number > _LOOKS and task not in self._late:
                self._late.add(task)
                task.cancel()
        self._timer = None
        if self._begun:
            self._look_later()
