"""The OpenAI server: starts its process, starts it again when it ends, and ends it with the daemon.

The daemon holds the listener. So the port stays the same, and clients that connect while no process runs wait for the
next one.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final, Protocol

from genserve.addresses import joined
from genserve.backoff import Backoff
from genserve.control.state import StateBoard
from genserve.frontends.frontend import FrontEnd, Seat, Starter
from genserve.frontends.settings import FrontendSettings
from genserve.frontends.supervisor import Asked

_START_TIMEOUT_S = 600.0
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 60.0
_STEADY_S: Final = 60.0
"""A process that has run for so long is not counted as one that fails."""
_MAX_FAILURES: Final = 8


class Launch(Starter, Protocol):
    """Starts processes that serve on a listener."""

    @property
    def listener(self) -> socket.socket:
        """Of HTTP."""

    @property
    def scheme(self) -> str:
        """http or https."""

    @property
    def how_ended(self) -> str:
        """How the last one ended, for people."""


class OpenAIServer(Asked):
    """One process at a time, at a seat of the engine. `say` prints messages for people."""

    def __init__(self, launch: Launch, seat: Seat, board: StateBoard, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._host, self.port = launch.listener.getsockname()[:2]
        settings = FrontendSettings(os.getpid(), 0, -1, (), self.port)
        self._process = FrontEnd(
            launch, seat, settings, None, say, what="OpenAI server", start_timeout_s=_START_TIMEOUT_S
        )
        super().__init__(board, [self._process])
        self._not_started = ""  # why the last one could not be started, for people
        self._refuses = False

    def __str__(self) -> str:
        return f"{self._launch.scheme}://{joined(self._host, self.port)}"

    async def start(self, stopped: asyncio.Event) -> None:
        """Returns when it serves, or when the daemon is to stop. Raises RuntimeError if its process ends before, or if
        it does not serve in time."""
        starting, stopping = asyncio.create_task(self._process.start()), asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        except RuntimeError as error:
            await self._process.wait_ended()
            raise RuntimeError(f"{error} ({self._launch.how_ended})") from error
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.wait({starting, stopping})

    async def run(self) -> None:
        """Starts the process again when it ends: at first after a second, then ever later. Gives up when it has ended
        eight times without having run for a minute. Ends one that does not answer. Never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(), name="openai-process")
            group.create_task(self._tell_changes(self._process), name="openai-answers")

    def refuse(self) -> None:
        """Accepts no more requests. The process ends when it has answered those that it has."""
        self._refuses = True
        self._launch.listener.close()
        self._process.finish()

    async def wait_ended(self) -> None:
        """Returns when the process has ended. May be cancelled."""
        await self._process.process_ended()

    def kill(self) -> None:
        """Ends the process at once, and starts no other one."""
        self._refuses = True
        self._launch.listener.close()
        self._process.kill()

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        self.refuse()
        await self._process.stop()

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        num_failures, began_s, backoff = 0, clock(), Backoff(_FIRST_DELAY_S, _MAX_DELAY_S)
        while True:
            await self._process.wait_ended()
            how = self._not_started or self._launch.how_ended
            if clock() - began_s >= _STEADY_S:
                num_failures = 0
                backoff.reset()
            num_failures += 1
            if self._refuses or num_failures == _MAX_FAILURES:
                break
            delay_s = backoff.next_s()
            self._say(f"openai: the server {how}; it is started again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            began_s = clock()
            if not self._refuses:
                await self._start_again()
        if not self._refuses:
            self._launch.listener.close()
            self._say(f"openai: the server {how}, after {num_failures} starts: it is not started again")
        await asyncio.Event().wait()  # the daemon serves on without it

    async def _start_again(self) -> None:
        """Starts another process. A start that fails counts as a process that has ended: the machine may have files and
        processes again later."""
        self._not_started = ""
        try:
            await self._process.start()
        except OSError as error:
            self._not_started = f"could not be started: {error}"
        except RuntimeError:
            pass  # it has ended, or is being ended
