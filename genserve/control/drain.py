"""The shutdown of a daemon: running work may finish, within one deadline for all of it.

A tainted or sleeping engine is not resumed for this: its requests are aborted instead.
"""

import asyncio
import enum
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from genserve.control.conditions import DaemonCondition, may_run
from genserve.control.membership import RETURN_S
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.observe.notices import say
from genserve.process.signals import Stopped

_TELL_AFTER_S: Final = 1.0


class Closes(Protocol):
    """Accepts changes of weights: pushes, or updates through vLLM's own transfer; or writes them to a disk."""

    async def close(self) -> None:
        """Accepts no more, and returns when the one in progress has ended. May be cancelled."""


class Keeps(Closes, Protocol):
    """Writes what is served to a disk."""

    @property
    def keeps_served(self) -> bool:
        """Whether the served version is there: the disk may have been full."""


class HttpServer(Protocol):
    """Serves requests of its own from the same engine, in a separate process."""

    def refuse(self) -> None:
        """Accepts no more requests."""

    async def wait_ended(self) -> None:
        """Returns when it has answered those that it has, and its process has ended. May be cancelled."""


class Step(enum.Enum):
    """What a drain waits for, in this order; the values are for people."""

    UPDATE = "a weight update"  # first, as it keeps the engine still
    PAUSE = "a pause"  # before pushes: requests run while those end
    PUSH = "a push"
    REQUESTS = "requests"
    ANSWERS = "answers over HTTP"  # the engine has nothing more to do, but their clients have not read all of it
    KEEPING = "writing the served version to --keep-committed"
    HAND_OVER = "the handing over of what was pushed to another replica"  # it can be read until the end


@dataclass(slots=True)
class Drained:
    """How a drain ended. `in_order`: no call to the engine hangs. `cut`: descriptions of what was cut off."""

    in_order: bool = True
    cut: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Drain:
    """Ends running work: weight updates, then pauses, pushes and requests."""

    engine: Engine
    board: StateBoard
    pauses: PauseController
    updates: Closes
    pushes: Closes
    http: HttpServer | None = None
    keeper: Keeps | None = None
    _step: Step = Step.UPDATE

    async def run(self, stopped: Stopped, flag_s: float) -> Drained:
        """Refuses new calls, and returns when nothing runs any more, or when there is no more time: as `stopped` says,
        or else after `flag_s`. Raises EngineDeadError."""
        self.board.become(DaemonCondition.DRAINING)
        if self.http is not None:
            self.http.refuse()
        drained = Drained()
        ending = asyncio.create_task(self._end(drained), name="drain")
        # Not asyncio.timeout: work that hangs may not end in time when it is cancelled.
        if await stopped.wait_ended(ending, flag_s):
            ending.result()
            return drained
        ending.cancel()
        drained.in_order = self._step is not Step.UPDATE
        if self._step is not Step.REQUESTS:
            lost = "; what was pushed may be lost: push it again" if self._step is Step.HAND_OVER else ""
            drained.cut.append(f"gave up {self._step.value}, which did not end in time{lost}")
        await self._abort(drained, "that did not finish in time")
        return drained

    async def _end(self, drained: Drained) -> None:
        self.pauses.cancel_pending()
        self._step = Step.UPDATE
        await self.updates.close()
        self._step = Step.PAUSE
        await self.pauses.resume("", force=True)
        self._step = Step.PUSH
        await self.pushes.close()
        self._step = Step.REQUESTS
        if not may_run(self.board.engine_condition):
            await self._abort(drained, f"of an engine that is {self.board.engine_condition.value}")
        await self.engine.wait_idle()
        if self.http is not None:
            self._step = Step.ANSWERS
            await self.http.wait_ended()
        if self.keeper is not None:
            self._step = Step.KEEPING
            await self.keeper.close()
        self._step = Step.HAND_OVER
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Waits until the router of its fleet does not need what was pushed: others have it."""
        membership = self.board.membership
        if not membership.router_address:
            return
        tell_s: float | None = _TELL_AFTER_S  # others have it nearly always, and the router tells so at once
        while self._has_pushed and not membership.is_let_go and await self._has_router():
            changed = self.board.changed.next
            try:
                async with asyncio.timeout(tell_s):
                    await changed.wait()
            except TimeoutError:
                tell_s = None
                say(
                    f"no other replica of the router at {membership.router_address} has what was pushed (version "
                    f"{self.board.weight_version}): waiting until one has fetched it"
                )

    async def _has_router(self) -> bool:
        """Whether a router looks after this daemon. One whose connection has broken comes back soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                while not self.board.membership.router_address:
                    await self.board.changed.wait()
        return bool(self.board.membership.router_address)

    @property
    def _has_pushed(self) -> bool:
        comes_back = self.keeper is not None and self.keeper.keeps_served  # with the daemon, from its disk
        if self.board.state().served.push_id and not comes_back:
            return True
        return any(each.push_id for each in self.engine.loras.loaded())

    async def _abort(self, drained: Drained, which: str) -> None:
        aborted, _ = await self.engine.abort(None)
        if aborted:
            drained.cut.append(f"aborted requests {which}: {len(aborted)}")
