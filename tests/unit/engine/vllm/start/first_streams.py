"""A stream whose tokens come one by one."""

import asyncio
from collections.abc import Callable

from genserve.engine.generation import GenerationUpdate


class FirstStream:
    """Has two updates, each a turn of the event loop after the one before it, or fails at once with `error`."""

    def __init__(self, request_id: str, error: Exception | None) -> None:
        self.request_id = request_id
        self._error = error
        self._num_left = 2

    @property
    def is_finished(self) -> bool:
        """After the second update."""
        return self._num_left == 0

    def take(self) -> GenerationUpdate | None:
        """The next one."""
        if self._error is not None:
            raise self._error
        self._num_left -= 1
        self._tell_soon()
        return GenerationUpdate(None, [], None)

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls it in the next turn, and again after each update."""
        self._callback = callback
        self._tell_soon()

    def _tell_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._callback)

    def abort(self) -> None:
        """Nobody does."""

    async def close(self) -> None:
        """Nobody does."""
