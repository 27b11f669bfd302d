"""The receiving processes of the daemon: starts them, keeps them going, and ends them."""

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from genserve.ingest.relay import IngestSettings
from genserve.process.leftovers import prefix
from genserve.process.signals import ending
from genserve.process.supervisor import Supervised, start_all

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class Receiver(Supervised):
    """One process at a time, on the port that the first one has found."""

    def __init__(self, settings: IngestSettings) -> None:
        self._settings = settings
        self.process: Process | None = None

    def __str__(self) -> str:
        return f"receiving process on port {self.port}" if self.port else "receiving process"

    @property
    def port(self) -> int:
        """Where it serves; 0 before the first one."""
        return self._settings.port

    async def start(self) -> None:
        """Starts a process, and returns when it serves. Raises OSError and RuntimeError."""
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "genserve.ingest", self._settings.to_json(), stdin=PIPE, stdout=PIPE
        )
        assert process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        if not line.strip().isdigit():
            with suppress(ProcessLookupError):
                process.kill()
            raise RuntimeError(f"it did not start ({await self.ended()})")
        self._settings = replace(self._settings, port=int(line))

    async def ended(self) -> str:
        """Its streams are cut off then, and their clients resume them."""
        assert self.process is not None
        status = await self.process.wait()
        _close_stdin(self.process)
        return f"it {ending(status)}"

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        if (process := self.process) is None:
            return
        _close_stdin(process)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class IngestProcesses:
    """`count` processes, each on its own port."""

    def __init__(self, count: int, settings: IngestSettings) -> None:
        """Adds the daemon's own address to `settings`: a socket in a directory that only this user can open."""
        self._directory = tempfile.TemporaryDirectory(prefix=prefix("ingest"))
        self.address = f"unix:{Path(self._directory.name) / 'daemon'}"
        self._all = [Receiver(replace(settings, daemon=self.address, port=0)) for _ in range(count)]

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of those that serve, or will again."""
        return tuple(each.port for each in self._all if not each.is_down)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids."""
        return tuple(each.process.pid for each in self._all if each.process is not None)

    async def start(self) -> None:
        """Starts all processes. Raises RuntimeError if one does not start."""
        await start_all(self._all)

    async def run(self) -> None:
        """Keeps them going. Never returns: the daemon receives pushes itself without one that stays down."""
        await asyncio.gather(*(each.run(serves=True) for each in self._all))
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Ends the processes, and kills those that do not end."""
        await asyncio.gather(*(each.stop() for each in self._all))
        self._directory.cleanup()


def _close_stdin(process: Process) -> None:
    """Ends a process by closing its stdin, which also frees the daemon's end if it has ended already."""
    assert process.stdin is not None
    process.stdin.close()
