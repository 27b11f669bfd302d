"""Puts the engine to sleep and wakes it up, part by part.

Shares its turns with pauses and pushes. What of the engine is asleep, and which part may follow which, is `asleep`. A
version is applied over weights that a sleep has dropped before the engine can run, unless a push has done so by then.
"""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from genserve.control.asleep import Asleep, SleepDepth, tags_of
from genserve.control.conditions import EngineCondition
from genserve.control.pause import PauseController, remaining_s
from genserve.control.phase_admission import check_sound
from genserve.control.state import StateBoard
from genserve.control.turn import check_timeout, uninterrupted
from genserve.engine.protocol import MEMORY_TAGS, Engine, KvPolicy, PauseMode, SleepTag
from genserve.errors import EngineDeadError, GenserveError, UnsupportedError

_WAKE_UP_TIMEOUT_S = 120.0
_WEIGHTS = frozenset({SleepTag.WEIGHTS})
_SCHEDULING = frozenset({SleepTag.SCHEDULING})

log = logging.getLogger(__name__)


class RestoresWeights(Protocol):
    """Has the bytes of the served version, and applies those of pushes."""

    def between_pushes(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """A time in which no push is applied: it begins when the one that is has ended. Raises DeadlineError, naming
        the push that took longer."""

    async def restore_dropped(self) -> None:
        """Applies the served version over weights that are of none; call it between pushes, while nothing is scheduled.
        Raises EngineTaintedError when it cannot."""


class SleepController:
    """Sleep and wake-up, among the pauses of `pauses`."""

    def __init__(self, engine: Engine, pauses: PauseController, board: StateBoard, restores: RestoresWeights) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._restores = restores

    async def sleep(self, mode: PauseMode, depth: SleepDepth, timeout_s: float) -> None:
        """Puts the engine, or more of it, to sleep, also under leases; does nothing when all of it sleeps, or as much
        as was asked for. Weights fall asleep when the push that is being applied has ended: its version is served
        afterwards. Raises as `PauseController.pause`, UnsupportedError and EngineTaintedError; what was awake is awake
        again then."""
        is_asleep = self._board.engine_condition in (EngineCondition.ASLEEP, EngineCondition.WEIGHTS_AWAKE)
        if is_asleep and not self._board.asleep.takes(depth):
            return
        check_timeout(timeout_s)
        ends_s = time.monotonic() + timeout_s
        async with AsyncExitStack() as between:
            if SleepTag.WEIGHTS in depth.tags:
                # Before the turn, which the push needs for its commit.
                await between.enter_async_context(self._restores.between_pushes(timeout_s))
            async with self._pauses.turn.take(remaining_s(ends_s), for_weights=True) as deadline_s:
                check_sound(self._board.engine_condition)
                before = self._board.asleep
                if not before.takes(depth):  # another call has done it meanwhile
                    return
                if not self._engine.info.can_sleep:
                    raise UnsupportedError("the daemon was started without --enable-sleep-mode")
                await self._pauses.stand_still(mode, KvPolicy.REUSE, deadline_s)
                after, falling = before.after_sleep(depth), (depth.tags - before.tags) | _SCHEDULING
                try:
                    await self._engine.sleep(depth.level, falling, remaining_s(deadline_s))
                except EngineDeadError:
                    raise
                except BaseException:
                    # Pushes wait until it is undone, which may take longer than this call.
                    await self._pauses.turn.undo(self._undo(before, after, between.pop_all()))
                    raise
                self._board.tell_asleep(after)

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Wakes up these parts (none = all). When none of its memory is asleep any more the engine runs, or stays
        paused while a lease is left. Parts that are awake are left alone.

        Raises InvalidFieldError ("tags"), DeadlineError, EngineDeadError, and what `RestoresWeights.restore_dropped`
        does; what could not be woken sleeps on then, and nothing is scheduled.
        """
        woken = tags_of(tags)
        async with self._turn_to_wake_up(woken):
            if self._board.engine_condition is EngineCondition.DEAD:
                raise EngineDeadError("the engine has died")
            if self._board.asleep.tags:
                await uninterrupted(self._wake_up(self._board.asleep.after_wake_up(woken).tags))

    @asynccontextmanager
    async def _turn_to_wake_up(self, woken: frozenset[SleepTag]) -> AsyncIterator[None]:
        """The turn; between pushes, if a version has to be applied when these parts are awake."""
        while True:
            async with AsyncExitStack() as stack:
                if is_between := self._restores_at(woken):
                    # Before the turn, which a push needs for its commit; it may bring the weights that are missing.
                    await stack.enter_async_context(self._restores.between_pushes(_WAKE_UP_TIMEOUT_S))
                await stack.enter_async_context(self._pauses.turn.take())
                if is_between or not self._restores_at(woken):
                    yield
                    return
                # Weights were dropped while this call waited for its turn.

    def _restores_at(self, woken: frozenset[SleepTag]) -> bool:
        """Whether the engine runs when these parts are awake, and a version has to be applied before."""
        asleep = self._board.asleep
        return bool(asleep.tags) and not asleep.after_wake_up(woken).tags and self._needs_restoring

    @property
    def _needs_restoring(self) -> bool:
        """Whether a version has to be applied before the engine may run."""
        return self._board.asleep.weights_lost or self._board.engine_condition is EngineCondition.TAINTED

    async def _wake_up(self, left: frozenset[SleepTag]) -> None:
        """Wakes up all but what is left asleep."""
        asleep = (self._board.asleep.tags - left) & MEMORY_TAGS
        # Alone, if it is not the last part: vLLM runs when it has woken that.
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
            # It may run by now, or later, while everybody is told that it sleeps.
            await self._pauses.turn.undo(self._pauses.restore(paused=True))
            raise
        self._pauses.woke_up(paused=paused)
        self._board.tell_asleep(Asleep())

    async def _wake(self, tags: frozenset[SleepTag]) -> None:
        """Wakes up a part while another one sleeps on."""
        await self._engine.wake_up(tags, _WAKE_UP_TIMEOUT_S)
        asleep = self._board.asleep
        self._board.tell_asleep(Asleep(asleep.tags - tags, asleep.weights_lost))

    async def _undo(self, before: Asleep, after: Asleep, between: AsyncExitStack) -> None:
        """Wakes up what a sleep that failed may have put to sleep; then it is not between pushes any more."""
        async with between:
            await self._wake_again(before, after)

    async def _wake_again(self, before: Asleep, after: Asleep) -> None:
        drops = after.weights_lost and not before.weights_lost
        try:
            if drops:
                await self._engine.wake_up(_WEIGHTS, _WAKE_UP_TIMEOUT_S)
                await self._pauses.restore(paused=True)  # it runs if nothing of it had fallen asleep
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
        """Whether the weights that a sleep may have dropped are there again; if not the engine sleeps on."""
        try:
            await self._restores.restore_dropped()
        except EngineDeadError:
            raise
        except GenserveError as error:
            log.error("a sleep failed when it may have dropped the weights, and the engine sleeps on: %s", error)
            return False
        return True
