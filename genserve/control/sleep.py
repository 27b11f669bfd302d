"""Puts the engine to sleep and wakes it up, part by part.

It shares turns with pauses and pushes. `asleep` knows which parts are asleep, and in which order they may wake up. If a
sleep dropped the weights, a version is applied before the engine can run, unless a push did this already.
"""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from genserve.control.asleep import Asleep, SleepDepth, tags_of
from genserve.control.conditions import EngineCondition, check_alive, check_untainted
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.control.turn import remaining_s, uninterrupted
from genserve.engine.protocol import Engine
from genserve.engine.types import MEMORY_TAGS, KvPolicy, PauseMode, SleepTag
from genserve.errors import EngineDeadError, GenserveError, UnsupportedError

_WAKE_UP_TIMEOUT_S = 120.0
_WEIGHTS = frozenset({SleepTag.WEIGHTS})
_SCHEDULING = frozenset({SleepTag.SCHEDULING})

log = logging.getLogger(__name__)


class RestoresWeights(Protocol):
    """Restores the served version from its bytes, and applies pushes."""

    def between_pushes(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """Waits for the push that is being applied, and then excludes others. Raises DeadlineError naming a push that
        takes longer than `timeout_s`."""

    async def restore_dropped(self) -> None:
        """Applies the served version over weights that were dropped or may be inconsistent. Call it between pushes,
        while nothing is scheduled. Raises EngineTaintedError if it cannot."""


class SleepController:
    """Sleep and wake-up. Shares its turns with the pauses of `pauses`."""

    def __init__(self, engine: Engine, pauses: PauseController, board: StateBoard, restores: RestoresWeights) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._restores = restores

    async def sleep(self, mode: PauseMode, depth: SleepDepth, timeout_s: float) -> None:
        """Puts the engine, or more parts of it, to sleep, also under leases. Does nothing if these parts already sleep.
        Weights fall asleep after the push that is being applied, whose version is served afterwards. Raises as
        `PauseController.pause`, UnsupportedError and EngineTaintedError; parts that were awake are awake again then."""
        is_asleep = self._board.engine_condition in (EngineCondition.ASLEEP, EngineCondition.WEIGHTS_AWAKE)
        if is_asleep and not self._board.asleep.takes(depth):
            return
        ends_s = time.monotonic() + timeout_s
        async with AsyncExitStack() as between:
            if SleepTag.WEIGHTS in depth.tags:
                # Taken before the turn, because the push needs the turn for its commit.
                await between.enter_async_context(self._restores.between_pushes(timeout_s))
            async with self._pauses.turn.take(
                remaining_s(ends_s, "sleep"), for_weights=True, by="a sleep"
            ) as deadline_s:
                check_untainted(self._board.engine_condition)
                before = self._board.asleep
                if not before.takes(depth):  # another call did it meanwhile
                    return
                if not self._engine.info.can_sleep:
                    raise UnsupportedError("the daemon was started without --enable-sleep-mode")
                await self._pauses.stand_still(mode, KvPolicy.REUSE, deadline_s)
                after, falling = before.after_sleep(depth), (depth.tags - before.tags) | _SCHEDULING
                try:
                    await self._engine.sleep(depth.level, falling, remaining_s(deadline_s, "sleep"))
                except EngineDeadError:
                    raise
                except BaseException:
                    # Pushes wait until the sleep is undone, which may take longer than this call.
                    await self._pauses.turn.undo(self._undo(before, after, between.pop_all()))
                    raise
                self._board.tell_asleep(after)

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Wakes up these parts (none = all), and ignores parts that are awake. When none of its memory is asleep the
        engine runs, or stays paused while a lease is left.

        Raises InvalidFieldError ("tags"), DeadlineError, EngineDeadError, and the errors of
        `RestoresWeights.restore_dropped`. Then parts that could not wake up stay asleep, and nothing is scheduled.
        """
        woken = tags_of(tags)
        async with self._turn_to_wake_up(woken):
            check_alive(self._board)
            if self._board.asleep.tags:
                await uninterrupted(self._wake_up(self._board.asleep.after_wake_up(woken).tags))

    @asynccontextmanager
    async def _turn_to_wake_up(self, woken: frozenset[SleepTag]) -> AsyncIterator[None]:
        """The turn; between pushes, if a version has to be applied when these parts are awake."""
        while True:
            async with AsyncExitStack() as stack:
                if is_between := self._restores_at(woken):
                    # Taken before the turn, because a push needs the turn for its commit; it may bring the missing
                    # weights.
                    await stack.enter_async_context(self._restores.between_pushes(_WAKE_UP_TIMEOUT_S))
                await stack.enter_async_context(self._pauses.turn.take(by="a wake-up"))
                if is_between or not self._restores_at(woken):
                    yield
                    return
                # Weights were dropped while this call waited for its turn.

    def _restores_at(self, woken: frozenset[SleepTag]) -> bool:
        """Whether the engine would run after this wake-up, and a version must be applied before."""
        asleep = self._board.asleep
        return bool(asleep.tags) and not asleep.after_wake_up(woken).tags and self._needs_restoring

    @property
    def _needs_restoring(self) -> bool:
        """Whether a version must be applied before the engine may run."""
        return self._board.asleep.weights_lost or self._board.engine_condition is EngineCondition.TAINTED

    async def _wake_up(self, left: frozenset[SleepTag]) -> None:
        """Wakes up all parts except `left`."""
        asleep = (self._board.asleep.tags - left) & MEMORY_TAGS
        # Separately, if it is not the last part: vLLM runs once it has woken the last one.
        if SleepTag.WEIGHTS in asleep and self._board.asleep.tags & MEMORY_TAGS != _WEIGHTS:
            await self._wake(_WEIGHTS)
            asleep -= _WEIGHTS
        if left:
            if asleep:
                await self._wake(asleep)
            return
        if self._needs_restoring:
            await self._restores.restore_dropped()
            self._board.enter(None)
        paused = self._pauses.is_leased
        try:
            await self._engine.wake_up(asleep | _SCHEDULING, _WAKE_UP_TIMEOUT_S, paused=paused)
        except EngineDeadError:
            raise
        except BaseException:
            # The engine may run now or later, while its state says that it sleeps.
            await self._pauses.turn.undo(self._pauses.restore(paused=True))
            raise
        self._pauses.woke_up(paused=paused)
        self._board.tell_asleep(Asleep())

    async def _wake(self, tags: frozenset[SleepTag]) -> None:
        """Wakes up a part while another one stays asleep."""
        await self._engine.wake_up(tags, _WAKE_UP_TIMEOUT_S)
        asleep = self._board.asleep
        self._board.tell_asleep(Asleep(asleep.tags - tags, asleep.weights_lost))

    async def _undo(self, before: Asleep, after: Asleep, between: AsyncExitStack) -> None:
        """Wakes up what a failed sleep may have put to sleep, and then lets pushes continue."""
        async with between:
            await self._wake_again(before, after)

    async def _wake_again(self, before: Asleep, after: Asleep) -> None:
        drops = after.weights_lost and not before.weights_lost
        try:
            if drops:
                await self._engine.wake_up(_WEIGHTS, _WAKE_UP_TIMEOUT_S)
                await self._pauses.restore(paused=True)  # it runs if no part had fallen asleep
                self._board.tell_asleep(Asleep(after.tags - _WEIGHTS, weights_lost=True))
                if not await self._try_restore():
                    return
            woken = (after.tags - before.tags) & MEMORY_TAGS
            runs, paused = not before.tags & MEMORY_TAGS, self._pauses.is_leased
            await self._engine.wake_up(woken | _SCHEDULING if runs else woken, _WAKE_UP_TIMEOUT_S, paused=paused)
        except Exception as error:
            self._pauses.fail(error)
            raise
        self._board.tell_asleep(Asleep(before.tags, before.weights_lost))
        if runs:
            self._pauses.woke_up(paused=paused)

    async def _try_restore(self) -> bool:
        """Restores weights that a sleep may have dropped. Returns whether it worked; if not, the engine stays
        asleep."""
        try:
            await self._restores.restore_dropped()
        except EngineDeadError:
            raise
        except GenserveError as error:
            log.error("a sleep failed and may have dropped the weights; the engine stays asleep: %s", error)
            return False
        return True
