"""Waits for what is on its way, where nothing tells when the last of it has come."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_NUM_ALIKE = 5
_INTERVAL_S = 0.2
_LIMIT_S = 60.0


async def unchanging(read: Callable[[], T]) -> T:
    """What `read` returns when it has stayed the same for a second. Raises TimeoutError."""
    found, num_alike = read(), 0
    async with asyncio.timeout(_LIMIT_S):
        while num_alike < _NUM_ALIKE:
            await asyncio.sleep(_INTERVAL_S)
            now = read()
            num_alike, found = num_alike + 1 if now == found else 0, now
    return found
