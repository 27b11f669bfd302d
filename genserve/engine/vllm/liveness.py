"""Waits for an engine that may die or hang: vLLM's calls never return if EngineCore is killed.

Every call to vLLM's engine comes back here, and so does the failure of a stream: here the end of the engine becomes
EngineDeadError with its cause, whatever vLLM raises for it.

A call that EngineCore has begun cannot be revoked: the waiting caller may give up, and EngineCore continues. So a call
is never cancelled here. It ends by itself, and `settled` tells when.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Set
from contextlib import suppress
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.errors import DeadlineError, EngineDeadError
from genserve.process.signals import ending

T = TypeVar("T")

_CAUSE_WITHIN_S = 5.0
"""vLLM refuses calls a moment before it reports that the engine has died."""
UNTOLD = "EngineCore reported an error: see the log above"

log = logging.getLogger(__name__)


class Liveness:
    """Whether the engine lives, and calls that end at its death or at a deadline."""

    def __init__(
        self, on_death: Callable[[], None] = lambda: None, explain: Callable[[str], str] = lambda cause: cause
    ) -> None:
        """`on_death` is called once, when the engine is declared dead. `explain` makes the cause of what was declared:
        whoever finds the engine dead may not know why."""
        self.cause_of_death = ""
        """For people."""
        self.dead = False
        """Whether it has died."""
        self._death = asyncio.Event()
        self._on_death = on_death
        self._explain = explain
        self._calls: set[asyncio.Task[Any]] = set()
        self.settling: set[asyncio.Task[Any]] = set()
        """The calls that the next one would have to wait for."""
        self._occupying: set[asyncio.Task[Any]] = set()

    def declare_dead(self, cause: str) -> None:
        """Ends every waiting call: the engine has died, or cannot be trusted to answer any more. The first cause is
        kept."""
        if not self.dead:
            self.cause_of_death = self._explain(cause)
            self.dead = True
            self._death.set()
            self._on_death()
            for call in self._calls:
                call.cancel()  # no answer comes any more

    async def wait_dead(self) -> None:
        """Returns when it has died."""
        await self._death.wait()

    @property
    def occupying(self) -> Set[asyncio.Task[Any]]:
        """The running calls that may occupy the engine for long, and whose deadlines have not passed."""
        return frozenset(self._occupying)

    async def settled(self) -> None:
        """Returns when the engine is dead, or has ended every call made until now, also those that nobody waits for.
        Later calls do not count, because there may always be some."""
        calls = set(self.settling)
        while calls and not self.dead:
            _, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout_s: float, occupies: bool = True) -> T:
        """The engine's answer. Raises EngineDeadError or DeadlineError if these come first.

        A call that `occupies` the engine excludes everything else until it ends, and counts for `occupying` and
        `settled`. Another call may stay unanswered for long while the engine takes further ones.
        """
        task = asyncio.create_task(coroutine, name=f"engine {what}")
        self._calls.add(task)
        if occupies:
            self.settling.add(task)
            self._occupying.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(self.settling.discard)
        try:
            return await self._race(task, what, timeout_s)
        finally:
            self._occupying.discard(task)
            if not task.done():
                task.add_done_callback(_log_failure)

    async def wait(self, work: "Coroutine[Any, Any, T] | asyncio.Future[T]", *, what: str, timeout_s: float) -> T:
        """Like `call`, for a wait in this process: it is cancelled when nobody waits for it any more."""
        task = asyncio.ensure_future(work)
        try:
            return await self._race(task, what, timeout_s)
        finally:
            task.cancel()

    async def raise_if_dead(self, error: Exception, what: str) -> None:
        """Raises EngineDeadError with the cause if the engine's death is why `what` failed with this error of vLLM."""
        if isinstance(error, EngineDeadError | VllmEngineDeadError):
            await self._cause_told()
        if self.dead:
            raise self.died(what) from error

    async def _race(self, task: "asyncio.Future[T]", what: str, timeout_s: float) -> T:
        death = asyncio.create_task(self._death.wait())
        racing: set[asyncio.Future[Any]] = {task, death}
        try:
            await asyncio.wait(racing, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if task.done() and not task.cancelled():
            try:
                return task.result()
            except Exception as error:
                await self.raise_if_dead(error, what)
                raise
        if self.dead:
            raise self.died(what)
        raise DeadlineError(f"{what} did not finish within {timeout_s:g} s")

    async def _cause_told(self) -> None:
        """vLLM says that the engine has died: waits for the cause, which comes another way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_WITHIN_S):
                await self._death.wait()
        self.declare_dead(UNTOLD)

    def died(self, what: str = "") -> EngineDeadError:
        """The error of a call that the death ended, or that came after it."""
        return EngineDeadError(f"the engine {f'died during {what}' if what else 'has died'}: {self.cause_of_death}")


def end_of(manager: Any) -> str:
    """What vLLM's `engine_manager` knows of the end of EngineCore."""
    # internal: the first process that has ended by itself; vLLM ends the others after it. Ray's have no status.
    name = getattr(manager, "failed_proc_name", None)
    if name is None:
        return UNTOLD
    statuses: dict[str, int] = getattr(manager, "finished_procs", dict)()
    return f"{name} {ending(statuses[name])}" if name in statuses else f"{name} has ended"


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s failed after it was given up: %s", task.get_name(), error)
