"""What one task writes and another one reads, with a bound on what waits between them."""

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

T = TypeVar("T")

READ_AHEAD: Final = 8  # messages


class PipeEndedError(Exception):
    """Nothing more is read."""


class Pipe(Generic[T]):
    """Messages in order, and their end, for one writer and one reader."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._has_some = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: BaseException | None = None
        self.is_ended = False

    async def write(self, message: T) -> None:
        """Waits while the reader has not taken what was written before. Raises PipeEndedError after `end`."""
        await self._has_room.wait()
        if self.is_ended:
            raise PipeEndedError
        self._messages.append(message)
        self._has_some.set()
        if len(self._messages) >= READ_AHEAD:
            self._has_room.clear()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more is written. The reader gets what was written, and then the error."""
        if not self.is_ended:
            self.is_ended, self._error = True, error
            self._has_some.set()
            self._has_room.set()

    async def read(self) -> T | None:
        """The next message, None at the end. Raises the error of the end."""
        while not self._messages:
            if self.is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._has_some.clear()
            await self._has_some.wait()
        message = self._messages.popleft()
        self._has_room.set()
        return message

    @property
    def error(self) -> BaseException | None:
        """The error of the end."""
        return self._error
