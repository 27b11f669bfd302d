"""Waiting for an engine that may die or hang: vLLM's calls never return when EngineCore is killed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from genserve.errors import DeadlineError, EngineDeadError

T = TypeVar("T")


class Liveness:
    """Whether the engine lives, and calls raced against its death and a deadline."""

    def __init__(self, on_death: Callable[[], None] = lambda: None) -> None:
        """`on_death` is called once, when it is declared dead."""
        self._dead = asyncio.Event()
        self._on_death = on_death

    @property
    def dead(self) -> bool:
        """Whether it has died."""
        return self._dead.is_set()

    def declare_dead(self) -> None:
        """Ends every call that waits: it has died, or can no longer be trusted to answer."""
        if not self._dead.is_set():
            self._dead.set()
            self._on_death()

    async def wait_dead(self) -> None:
        """Returns when it has died."""
        await self._dead.wait()

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout_s: float) -> T:
        """The result of `coroutine`; EngineDeadError or DeadlineError when those come first, and then the coroutine is
        cancelled."""
        task = asyncio.create_task(coroutine, name=f"engine {what}")
        death = asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.dead:
                raise EngineDeadError(f"the engine died during {what}")
            raise DeadlineError(f"{what} did not finish within {timeout_s:g} s")
        finally:
            death.cancel()
            task.cancel()
