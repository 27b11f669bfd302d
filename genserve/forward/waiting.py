"""The requests that wait for a replica, of all calls of one sender."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, Final, TypeVar

from genserve.errors import QueueFullError

T = TypeVar("T")

MAX_WAITING: Final = 1 << 14
"""Requests that wait in one process. Their messages are kept."""


class AbortedWhileWaitingError(Exception):
    """Somebody has ended the request before a replica had it."""


class Waiting:
    """Bounds how many there are, and ends them by their ids."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._count = 0
        self._aborts: dict[str, set[asyncio.Future[None]]] = {}

    async def wait(
        self,
        request_id: str,
        routing: Coroutine[Any, Any, T],
        aborted: "asyncio.Future[None] | None" = None,
    ) -> T:
        """The result of `routing`. Raises QueueFullError if too many wait, AbortedWhileWaitingError after `abort` or
        when `aborted` is done."""
        if self._count >= self._limit:
            routing.close()
            raise QueueFullError(f"{self._count} requests wait for a replica, the most that may", retry_after_s=1.0)
        if aborted is None:
            aborted = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(routing)
        self._count += 1
        self._aborts.setdefault(request_id, set()).add(aborted)
        try:
            either: set[asyncio.Future[Any]] = {task, aborted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                raise AbortedWhileWaitingError
            return task.result()
        finally:
            task.cancel()
            aborted.cancel()
            self._count -= 1
            self._aborts[request_id].discard(aborted)
            if not self._aborts[request_id]:
                del self._aborts[request_id]

    def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all. Returns the ids of those that waited."""
        found = [each for each in (self._aborts if request_ids is None else request_ids) if each in self._aborts]
        for request_id in found:
            for aborted in self._aborts[request_id]:
                if not aborted.done():
                    aborted.set_result(None)
        return found
