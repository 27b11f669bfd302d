"""A replica whose daemon is run by an actor."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from genserve.launcher.daemon_process import DaemonFailedError
from genserve.launcher.output import Serving
from genserve.observe.notices import say
from genserve.placement.config import START_TIMEOUT_S
from genserve.placement.ray.cluster import Ending, Placement, RayFailedError
from genserve.placement.ray.resources import place_on_node
from genserve.placement.replica import Members, Replica

_LATE_S: Final = 30.0
"""Ray starts an actor within seconds where there is room for it."""
_ANSWER_S: Final = 15.0
"""How long an actor that runs may take to answer."""
_AGAIN_S: Final = 1.0
_LONGEST_WORDS: Final = 400
_LOG: Final = Path("worker-*.err")


class RayDaemon:
    """One run of a daemon in an actor: a Daemon. An actor that is lost ends the run, because its daemon ends too."""

    def __init__(self, number: int, flags: Sequence[str], placement: Placement) -> None:
        self.serving: Future[Serving] = Future()
        self.ended: Future[bool] = Future()
        for future in (self.serving, self.ended):
            future.set_running_or_notify_cancel()  # who gives up waiting does not cancel what others wait for
        self._number = number
        self._flags = flags
        self._placement = placement
        self._actor: Any = None
        self._ending: Ending | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._following = asyncio.create_task(self._follow(), name=f"daemon {number}")

    @property
    def exit_status(self) -> int | None:
        """As DaemonProcess has it; None also if its actor was lost."""
        return None if self._ending is None else self._ending.exit_status

    def stop(self, timeout_s: float) -> None:
        """Asks it to drain. What is left after that time is killed, by its actor or with it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(timeout_s), name=f"stop {self._number}")

    def kill(self) -> None:
        """Waits for it no more: it ends with its actor."""
        self._end(Ending("the daemon was not waited for", was_killed=True))
        self._following.cancel()

    def failure(self, what: str = "") -> DaemonFailedError:
        """An error that says what has happened (default: how it has ended)."""
        ending = Ending("the daemon runs") if self._ending is None else self._ending
        return DaemonFailedError(what or ending.words, _LOG, ending.exit_status)

    async def _follow(self) -> None:
        try:
            self._end(await self._run())
        except ActorDiedError as error:
            self._placement.forget(self._number)
            self._end(_lost(error))
        except (RayError, RayFailedError) as error:
            self._end(_lost(error))
        except Exception as error:  # a bug, which must not leave others waiting
            waited_for = [future for future in (self.serving, self.ended) if not future.done()]
            if not waited_for:
                raise
            self._ending = Ending(f"it could not be followed: {error!r}")
            for future in waited_for:
                future.set_exception(error)

    async def _run(self) -> Ending:
        actor = await self._placement.actor(self._number)
        await self._until_placed(actor)
        index, num_here = place_on_node(self._number, await self._placement.node_of())
        self._actor = actor
        await actor.start.remote(self._flags, index, num_here)
        serving: Serving | None = await actor.serving.remote()
        if serving is not None:
            self.serving.set_result(serving)
        ending: Ending = await actor.ended.remote()
        return ending

    async def _until_placed(self, actor: Any) -> None:
        """However long this takes: the nodes of a cluster come and go."""
        late_s = asyncio.get_running_loop().time() + _LATE_S
        was_said = False
        while True:
            with suppress(ActorUnavailableError, TimeoutError):  # Ray starts it again
                async with asyncio.timeout(_ANSWER_S):
                    await actor.address.remote()
                return
            if not was_said and asyncio.get_running_loop().time() > late_s:
                was_said = True
                say(f"replica {self._number}: waiting until Ray has room for its actor again")
            await asyncio.sleep(_AGAIN_S)

    async def _stop(self, timeout_s: float) -> None:
        if self._actor is None:  # not started yet
            self.kill()
            return
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                await self._actor.stop.remote(timeout_s)
                await asyncio.wait({self._following})
        except (TimeoutError, RayError):
            self.kill()

    def _end(self, ending: Ending) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        if not self.serving.done():
            self.serving.set_exception(self.failure())
        self.ended.set_result(ending.was_killed)


class RayReplica(Replica[RayDaemon]):
    """One whose daemon runs in an actor, on whatever node Ray has put it."""

    def __init__(
        self,
        number: int,
        flags: Sequence[str],
        placement: Placement,
        members: Members,
        any_served: asyncio.Event,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(number, members, any_served, start_timeout_s)
        self._flags = flags
        self._placement = placement

    def _start(self) -> RayDaemon:
        return RayDaemon(self.number, self._flags, self._placement)


def _lost(error: Exception) -> Ending:
    words = " ".join(str(error).split())
    return Ending(f"its actor was lost ({words[:_LONGEST_WORDS]})")
