"""How long the other side of a stream may say nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

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
