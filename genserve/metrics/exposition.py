"""The text that a scraper gets: made in a thread, and at most once in a while however many ask."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from genserve.metrics.families import Family

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
MIN_INTERVAL_S = 1.0
"""Between two texts. To make one takes the interpreter for tens of milliseconds if there are many series of vLLM's."""


class Registry(Protocol):
    """As in prometheus_client."""

    def collect(self) -> Iterable[Family]:
        """All families."""


class Exposition:
    """The series of `registry`, which may be collected in a thread, and what `read` returns, which is called on the
    event loop."""

    def __init__(
        self, registry: Registry, read: Callable[[], Iterable[Family]], min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._registry = registry
        self._read = read
        self._min_interval_s = min_interval_s
        self._text = b""
        self._until_s = float("-inf")
        self._turn = asyncio.Lock()

    async def text(self) -> bytes:
        """The series as they are now, or were a moment ago."""
        async with self._turn:
            if time.monotonic() >= self._until_s:
                families = _Families(list(self._read()), self._registry)
                self._text = await asyncio.to_thread(generate_latest, families)
                self._until_s = time.monotonic() + self._min_interval_s
            return self._text


class _Families:
    def __init__(self, read: list[Family], registry: Registry) -> None:
        self._read = read
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        yield from self._read
        yield from self._registry.collect()
