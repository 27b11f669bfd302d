"""What an update costs those who generate, as far as it is known only after the update was answered.

Nothing waits for it. It holds the outcome of an update, and neither its bytes nor a stream.
"""

import asyncio
import logging

from genserve.control.pause import Hold
from genserve.engine.protocol import Interruption
from genserve.errors import EngineDeadError
from genserve.weights.push.types import Applied

log = logging.getLogger(__name__)


class Aftermath:
    """Follows updates that were applied. An interruption ends the one before, so few are followed at a time."""

    def __init__(self) -> None:
        self._following: set[asyncio.Task[None]] = set()

    def follow(self, applied: Applied, hold: Hold) -> None:
        """Writes to `applied` what `hold` did, when it is known."""
        if hold.interruption is not None:
            task = asyncio.create_task(_follow(applied, hold, hold.interruption), name="aftermath of an update")
            self._following.add(task)
            task.add_done_callback(self._following.discard)


async def _follow(applied: Applied, hold: Hold, interruption: Interruption) -> None:
    try:
        await interruption.told()
        applied.recomputed_tokens = hold.recomputed_tokens
        if hold.paused_s is not None:  # otherwise others decide how long requests wait
            applied.longest_wait_s = await interruption.longest_wait_s()
    except EngineDeadError:
        pass  # nobody generates any more
    except Exception:
        log.exception("what an update costs those who generate is not known")
