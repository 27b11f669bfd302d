"""Digests of the live weights.

A digest reads every byte. So workers read once for a version, a moment at a time, and all callers share one reading:
steps, pushes and pauses go on in between.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from genserve.control.conditions import check_weights_present
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.engine.types import WeightDigest
from genserve.errors import DeadlineError

DIGESTS_TIMEOUT_S: Final = 300.0
_STEPS_PER_PART: Final = 9.0
"""How much longer steps run than the part of a reading before them took, while requests wait for them."""
_INTERVAL_S: Final = 0.1
"""The shortest time between the end of a reading and the beginning of the next one while requests run: callers may ask
in a loop, and even an answer that workers know takes a moment between two steps."""


@dataclass(slots=True)
class _Reading:
    """One reading, and how many wait for it."""

    task: asyncio.Task[tuple[int, Sequence[WeightDigest]]]
    num_waiting: int = 0


class LiveDigests:
    """Reads the live weights while somebody waits for it."""

    def __init__(self, engine: Engine, pauses: PauseController, board: StateBoard) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._reading: _Reading | None = None
        self._read_at_s = -math.inf

    async def read(self) -> tuple[int, Sequence[WeightDigest]]:
        """Returns the live version and the digest of every tensor on every rank. Joins the running reading or begins
        one, which ends early if all its callers leave.

        Raises DeadlineError after `DIGESTS_TIMEOUT_S`, also where pushes came faster than they could be read, and
        EngineSleepingError, EngineTaintedError, EngineDeadError and DrainingError.
        """
        if self._reading is None or self._reading.task.done():
            self._reading = _Reading(asyncio.create_task(self._read(), name="digests of the live weights"))
        reading = self._reading
        reading.num_waiting += 1
        try:
            async with asyncio.timeout(DIGESTS_TIMEOUT_S):
                return await asyncio.shield(reading.task)
        except TimeoutError:
            raise DeadlineError(
                f"the live weights were not read within {DIGESTS_TIMEOUT_S:g} s: many requests run, or they changed "
                "before they were read; ask again when fewer run, or between pushes"
            ) from None
        finally:
            reading.num_waiting -= 1
            if not reading.num_waiting:
                reading.task.cancel()
                if self._reading is reading:
                    self._reading = None

    async def _read(self) -> tuple[int, Sequence[WeightDigest]]:
        wait_s = self._read_at_s + _INTERVAL_S - time.monotonic()
        while True:
            if wait_s > 0 and self._steps_run:
                await asyncio.sleep(wait_s)
            # A commit that waited for it for long would look as if it hangs; nothing that changes weights may come
            # between the last part and the version.
            async with self._pauses.undisturbed(DIGESTS_TIMEOUT_S, "the reading of digests"):
                check_weights_present(self._board.asleep.weights_lost)
                part = await self._engine.weights.digests(DIGESTS_TIMEOUT_S)
                if part.digests is not None:
                    self._read_at_s = time.monotonic()
                    return self._engine.weights.version, part.digests
            wait_s = _STEPS_PER_PART * part.spent_s
            await asyncio.sleep(0)

    @property
    def _steps_run(self) -> bool:
        return self._engine.load().running > 0 and not self._pauses.standstill.is_on
