"""The time that a client may take to make room for a message of a stream.

gRPC lets a writer wait for ever for a client that does not read. One timer looks at all writers of a server, now and
then, because a timer for each write would cost as much as a short message.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from genserve.errors import DeadlineError

T = TypeVar("T")

_LOOKS = 8
"""Within the time: a write ends late by an eighth of it at most."""


class WriteDeadline:
    """Of all streams of a server. `timeout_s` 0 = a write may take any time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """How long a write may take, in seconds."""
        self.writing: dict[Writer, asyncio.Task[Any]] = {}
        """The tasks in the blocks of their writers."""
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, write: Callable[[T], Awaitable[None]], message: T) -> None:
        """Writes, as `write` does. Raises DeadlineError if the client does not read for so long."""
        with Writer(self) as writer:
            writer.num_looks = 0
            await write(message)

    def look_later(self) -> None:
        """Looks at the writers from now on, until there are none."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        for writer, task in self.writing.items():
            if writer.num_looks is not None:
                writer.num_looks += 1
                if writer.num_looks > _LOOKS and not writer.is_late:
                    writer.is_late = True
                    task.cancel()
        self._timer = None
        if self.writing:
            self.look_later()


class Writer:
    """The block in which the running task writes messages of a stream, one after the other. Raises DeadlineError if the
    client does not read for so long.

    The task sets `num_looks`, the number of times that the timer has looked at the present write: to 0 before a write,
    and to None after it. A call instead, for each token, would be seen in the figures.
    """

    __slots__ = ("_deadline", "_num_cancelling", "is_late", "num_looks")

    def __init__(self, deadline: WriteDeadline) -> None:
        self._deadline = deadline
        self._num_cancelling = 0
        self.num_looks: int | None = None
        self.is_late = False

    def __enter__(self) -> "Writer":
        task, deadline = asyncio.current_task(), self._deadline
        if task is not None and deadline.timeout_s:
            self._num_cancelling = task.cancelling()
            deadline.writing[self] = task
            deadline.look_later()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task = self._deadline.writing.pop(self, None)
        # Another cancellation may have come as well, and counts.
        if (
            self.is_late
            and kind is asyncio.CancelledError
            and task is not None
            and task.uncancel() <= self._num_cancelling
        ):
            del task  # see genserve.aio
            raise DeadlineError(f"the client did not read for {self._deadline.timeout_s:g} s") from None
