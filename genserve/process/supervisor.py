"""Keeps a process going that this one has started: the one rule for its deaths, which docs/running.md tells operators.

It knows no kind of process: each says how one is started, and how one has ended.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from genserve.aio import Backoff
from genserve.observe.notices import say

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
MAX_DEATHS: Final = 5
LONG_LIFE_S: Final = 60.0
"""A process that has served for so long did not end because it cannot serve."""


@dataclass(slots=True)
class Deaths:
    """Those of one process since it last served for LONG_LIFE_S. A start that fails is one, however long it took.
    Pure: whoever uses it has the clock."""

    number: int = 0
    within_s: float = 0.0
    _first_s: float = 0.0
    _waits: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_S, LONGEST_WAIT_S))

    def add(self, now_s: float, served_s: float) -> float:
        """Counts one that has come now, after it has served for so long. Returns the wait before the next start."""
        if served_s >= LONG_LIFE_S:
            self.number = 0
            self._waits.reset()
        if self.number == 0:
            self._first_s = now_s
        self.number += 1
        self.within_s = now_s - self._first_s
        return self._waits.next_s()

    @property
    def are_too_many(self) -> bool:
        """Whether another start is not likely to help."""
        return self.number >= MAX_DEATHS


class Supervised(ABC):
    """A process that is restarted when it ends. Its `str` is its name for people."""

    is_wanted = True
    """False: it is to end, and stays ended."""
    is_down = False
    """It was given up."""

    @abstractmethod
    async def start(self) -> None:
        """Starts a process, and returns when it serves. Raises OSError, or RuntimeError with what has happened, and
        leaves nothing then."""

    @abstractmethod
    async def ended(self) -> str:
        """Returns when the process has ended, and has left nothing: how, for people."""

    def is_given_up(self, deaths: Deaths) -> bool:
        """Whether no other one is started after these."""
        return deaths.are_too_many

    def tell_given_up(self, how: str) -> None:
        """Tells people that it stays down."""
        say(f"{self}: {how}; it stays down")

    async def run(self, *, serves: bool = False) -> None:
        """Starts it, unless it `serves` already, and again whenever it ends. Returns when it is given up, or is to
        end."""
        clock = asyncio.get_running_loop().time
        deaths = Deaths()
        while True:
            served_s = 0.0
            how = None if serves else await _not_started(self)
            if how is None:
                since_s = clock()
                how = await self.ended()
                served_s = clock() - since_s
            serves = False
            wait_s = deaths.add(clock(), served_s)
            if self.is_wanted and self.is_given_up(deaths):
                self.is_down = True
                times = f", {deaths.number} times within {deaths.within_s:.0f} s" if deaths.number > 1 else ""
                self.tell_given_up(f"{how}{times}")
                return
            if self.is_wanted:
                say(f"{self}: {how}; it is started again in {wait_s:g} s")
                await asyncio.sleep(wait_s)
            if not self.is_wanted:
                return


async def start_all(processes: Sequence[Supervised]) -> None:
    """Starts them, for whoever does not go on without one. Raises RuntimeError, which names it."""
    for each, why in zip(processes, await asyncio.gather(*map(_not_started, processes)), strict=True):
        if why is not None:
            raise RuntimeError(f"{each}: {why}")


async def _not_started(process: Supervised) -> str | None:
    """Why; None: it serves."""
    try:
        await process.start()
    except OSError as error:  # no more processes or files: others may end
        return f"it cannot be started: {error}"
    except RuntimeError as error:
        return str(error)
    return None
