"""Limits how many streams may watch one thing at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from genserve.errors import QueueFullError

MAX_WATCHERS = 1024


class Watchers:
    """Counts the streams of one method, each of which wakes up at every change."""

    def __init__(self, what: str, limit: int = MAX_WATCHERS) -> None:
        self._what = what
        self._limit = limit
        self._count = 0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Counts one more stream for the length of the block. Raises QueueFullError."""
        if self._count >= self._limit:
            raise QueueFullError(f"{self._count} streams watch {self._what}: the limit is reached", retry_after_s=1.0)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
