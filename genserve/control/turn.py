"""Whose turn it is to drive the engine: one caller at a time. The next caller waits until the engine has finished
everything that the previous one asked for."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from genserve.control.conditions import check_control, check_weights
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.errors import DeadlineError

# How long a caller waits for its failed call to be undone. If the engine takes longer, other callers still wait.
_UNDO_GRACE_S = 1.0

T = TypeVar("T")


async def uninterrupted(work: "Coroutine[Any, Any, T] | asyncio.Future[T]") -> T:
    """Runs `work` to its end even if the caller is cancelled, and then raises the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            raise cancelled from (None if task.cancelled() else task.exception())
        return task.result()
    finally:
        del work, task, cancelled  # see genserve.aio


def remaining_s(deadline_s: float, step: str) -> float:
    """Seconds until a deadline on the monotonic clock. Raises DeadlineError if none is left for the step."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineError(f"no time was left to {step}; nothing changed")
    return left_s


class EngineTurn:
    """The turn. If a caller gives up (its client is gone, its time is over), the engine is still at work, and the turn
    lasts until it has finished. Otherwise the next pause would time out, and undoing that pause would too."""

    def __init__(self, engine: Engine, board: StateBoard) -> None:
        self._engine = engine
        self._board = board
        self._lock = asyncio.Lock()
        self._taken_by = ""
        self._undoing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def take(
        self, timeout_s: float | None = None, *, for_weights: bool = False, by: str = "another call"
    ) -> AsyncIterator[float]:
        """Takes the turn and yields the deadline on the monotonic clock. `by`: what takes it, for those who wait.

        With `timeout_s`, raises DeadlineError and the refusal of the phase for a pause,
        or with `for_weights` for a push. With None it waits without a limit and checks nothing."""
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{self._taken_by} kept the engine for {timeout_s:g} s, and nothing changed: allow more time"
            ) from None
        self._taken_by = by
        try:
            if timeout_s is not None and for_weights:
                check_weights(self._board)
            elif timeout_s is not None:
                check_control(self._board)
            yield deadline_s
        finally:
            if self._undoing is None and not self._engine.settling:
                self._lock.release()
            else:
                self._ending = asyncio.create_task(self._end(), name="end of a turn")

    async def undo(self, work: Coroutine[Any, Any, None]) -> None:
        """Undoes a failed call of this turn. Returns when this is done, or after a moment; then it continues within the
        turn. It is not cancelled with its caller."""
        self._undoing = asyncio.create_task(work, name="undoing")
        await uninterrupted(_wait(self._undoing))
        if self._undoing.done():
            done, self._undoing = self._undoing, None
            done.result()

    async def _end(self) -> None:
        if self._undoing is not None:
            await asyncio.wait({self._undoing})
            self._undoing = None
        await self._engine.settled()
        self._lock.release()


async def _wait(task: "asyncio.Task[None]") -> None:
    await asyncio.wait({task}, timeout=_UNDO_GRACE_S)
