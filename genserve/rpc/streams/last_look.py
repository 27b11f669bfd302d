"""A look at the engine just before a call's time is over: who waits for a paused engine learns who has paused it.

The client's own end of a call knows only that the time is over. So the server answers a moment before, if no token can
come: what it says travels as an error with details.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from genserve.control.waits import CanWait, late_because
from genserve.errors import DeadlineError

_BEFORE_S: Final = 0.5
"""The answer has to reach the client before its own deadline, also on a busy machine, and through a router."""
_SHARE: Final = 4
"""Of a short time the answer takes a quarter."""
_LONG_S: Final = 366 * 24 * 3600.0
"""A deadline beyond this is none."""


@asynccontextmanager
async def last_look(board: CanWait, remaining_s: float | None) -> AsyncIterator[None]:
    """Ends the block with DeadlineError a moment before `remaining_s` is over, if the engine generates nothing then.
    None = the call has no deadline."""
    if remaining_s is None or remaining_s > _LONG_S:
        yield
        return
    late: DeadlineError | None = None
    rest_s = min(_BEFORE_S, remaining_s / _SHARE)

    def look() -> None:
        nonlocal late
        late = late_because(board, time.time(), rest_s)
        if late is not None:
            limit.reschedule(loop.time())

    loop = asyncio.get_running_loop()
    looking: asyncio.TimerHandle | None = None
    try:
        async with asyncio.timeout(None) as limit:
            looking = loop.call_later(remaining_s - rest_s, look)
            yield
    except TimeoutError:
        if late is None:
            raise
        raise late from None
    finally:
        if looking is not None:
            looking.cancel()
        late = None  # with its frames
