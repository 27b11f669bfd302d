"""Starts, restarts and ends the receiving processes for the daemon."""

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from genserve.ingest.relay import IngestSettings
from genserve.leftovers import prefix

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_MAX_DEATHS = 4
_DEATHS_WITHIN_S = 60.0


class IngestProcesses:
    """`count` processes, each on its own port. `say` prints messages for people."""

    def __init__(self, count: int, settings: IngestSettings, say: Callable[[str], None]) -> None:
        """Adds the daemon's own address to `settings`: a socket in a directory that only this user can open."""
        self._directory = tempfile.TemporaryDirectory(prefix=prefix("ingest"))
        self.address = f"unix:{Path(self._directory.name) / 'daemon'}"
        self._settings = [replace(settings, daemon=self.address, port=0) for _ in range(count)]
        self._processes: list[Process] = []
        self._say = say

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the processes."""
        return tuple(each.port for each in self._settings)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids."""
        return tuple(process.pid for process in self._processes)

    async def start(self) -> None:
        """Starts all processes. Raises RuntimeError if one does not start."""
        self._processes = list(await asyncio.gather(*map(self._started, range(len(self._settings)))))

    async def run(self) -> None:
        """Restarts processes that die. Their streams are cut off, and their clients resume them. Never returns. Raises
        RuntimeError if one cannot be started, or dies four times within a minute."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._settings)):
                group.create_task(self._keep(index))

    async def _keep(self, index: int) -> None:
        clock = asyncio.get_running_loop().time
        died_at: deque[float] = deque(maxlen=_MAX_DEATHS)
        while True:
            process = self._processes[index]
            status = await process.wait()
            _close_stdin(process)
            died_at.append(clock())
            if len(died_at) == _MAX_DEATHS and died_at[-1] - died_at[0] < _DEATHS_WITHIN_S:
                raise RuntimeError(f"a receiving process ended with {status}, again and again")
            self._say(f"a receiving process ended with {status}; it is started again")
            self._processes[index] = await self._started(index)

    async def _started(self, index: int) -> Process:
        settings = self._settings[index]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "genserve.ingest",
            settings.to_json(),
            stdin=PIPE,
            stdout=PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
            port = int(line)
        except (TimeoutError, ValueError):
            with suppress(ProcessLookupError):
                process.kill()
            raise RuntimeError("a receiving process did not start") from None
        self._settings[index] = replace(settings, port=port)
        return process

    async def stop(self) -> None:
        """Ends the processes, and kills those that do not end."""
        for process in self._processes:
            _close_stdin(process)
        waiting = [asyncio.create_task(process.wait()) for process in self._processes]
        if waiting:
            await asyncio.wait(waiting, timeout=_STOP_TIMEOUT_S)
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*waiting)
        self._directory.cleanup()


def _close_stdin(process: Process) -> None:
    """Ends a process by closing its stdin, which also frees the daemon's end if it has ended already."""
    assert process.stdin is not None
    process.stdin.close()
