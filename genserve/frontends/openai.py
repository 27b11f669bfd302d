"""The OpenAI server: starts its process, keeps it going, and ends it with the daemon.

The daemon holds the listener. So the port stays the same, and clients that connect while no process runs wait for the
next one.
"""

import asyncio
import os
import socket

from genserve.addresses import joined
from genserve.control.state import StateBoard
from genserve.frontends.frontend import FrontEnd, Seat, Starter
from genserve.frontends.processes import Asked
from genserve.frontends.settings import FrontendSettings
from genserve.supervisor import start_all

_START_TIMEOUT_S = 600.0


class OpenAIServer(Asked):
    """One process at a time, at a seat of the engine. `starter` starts processes that serve on `listener`; `scheme`:
    http or https."""

    def __init__(self, starter: Starter, listener: socket.socket, scheme: str, seat: Seat, board: StateBoard) -> None:
        self._listener = listener
        self._scheme = scheme
        self._host, self.port = listener.getsockname()[:2]
        settings = FrontendSettings(os.getpid(), 0, -1, (), self.port)
        self._process = FrontEnd(starter, seat, settings, None, what="OpenAI server", start_timeout_s=_START_TIMEOUT_S)
        super().__init__(board, [self._process])

    def __str__(self) -> str:
        return f"{self._scheme}://{joined(self._host, self.port)}"

    async def start(self, stopped: asyncio.Event) -> None:
        """Returns when it serves, or when the daemon is to stop. Raises RuntimeError if its process ends before, or if
        it does not serve in time."""
        starting = asyncio.create_task(start_all([self._process]))
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.wait({starting, stopping})

    async def run(self) -> None:
        """Keeps the process going, and ends one that does not answer. When it stays down nobody can connect any more,
        and the daemon serves on. Never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(), name="openai-process")
            group.create_task(self._tell_changes(self._process), name="openai-answers")

    def refuse(self) -> None:
        """Accepts no more requests. The process ends when it has answered those that it has."""
        self._end()
        self._process.finish()

    async def wait_ended(self) -> None:
        """Returns when the process has ended. May be cancelled."""
        await self._process.process_ended()

    def kill(self) -> None:
        """Ends the process at once, and starts no other one."""
        self._end()
        self._process.kill()

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        self.refuse()
        await self._process.stop()

    def _end(self) -> None:
        self._process.is_wanted = False
        self._listener.close()

    async def _keep(self) -> None:
        await self._process.run(serves=True)
        self._listener.close()
