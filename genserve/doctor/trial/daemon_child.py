"""A daemon as users start it, with `genserve serve`, in a separate process."""

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from genserve.doctor.children import Children
from genserve.launcher.command import serve_command
from genserve.launcher.daemon_process import DaemonFailedError
from genserve.launcher.output import Serving, last_words
from genserve.process.signals import ending

_STOP_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 10.0
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_MAX_SOCKET_PATH_BYTES: Final = 107  # of Linux
_SOCKET_NAME_BYTES: Final = 36  # vLLM's are UUIDs


class DaemonChild:
    """A running daemon. `address` is where it serves. `stop` may be called once; leaving the context kills what is
    left."""

    def __init__(self, children: Children, process: Process, log: Path) -> None:
        self._children = children
        self._process = process
        self._log = log
        self._stopped = False
        self.address = ""

    async def wait_serving(self, timeout_s: float) -> None:
        """Waits until it serves. Raises DaemonFailedError."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                async for line in self._process.stdout:
                    if (serving := Serving.parse(line)) is not None:
                        self.address = serving.address
                        return
                status = await self._process.wait()
        except TimeoutError:
            raise DaemonFailedError(
                f"the daemon did not serve within {timeout_s:g} s (--timeout-s){self.last_words()}", self._log
            ) from None
        raise DaemonFailedError(f"the daemon {ending(status)}{self.last_words()}", self._log, status)

    async def stop(self) -> str:
        """Ends the daemon by a signal. Returns what was wrong with its end, "" if nothing."""
        self._stopped = True
        status = await self._children.stop(self._process, _STOP_TIMEOUT_S)
        if status is None:
            return f"it, or a process of it, had to be killed {_STOP_TIMEOUT_S:g} s after SIGTERM"
        return "" if status == 0 else f"it {ending(status)}{self.last_words()}"

    async def kill(self) -> None:
        """Kills the daemon if it was not stopped."""
        if not self._stopped:
            await self._children.stop(self._process, 0.0)

    async def read_on(self) -> None:
        """Reads stdout on: an unread pipe fills up, and vLLM can be told to log to stdout."""
        assert self._process.stdout is not None
        while await self._process.stdout.read(1 << 16):
            pass

    def last_words(self) -> str:
        """As `launcher.output.last_words`."""
        return last_words(self._log)


@asynccontextmanager
async def daemon(
    children: Children, model: Path, flags: Sequence[str], log: Path, timeout_s: float
) -> AsyncIterator[DaemonChild]:
    """A daemon that serves `model`, with its stderr in the file `log`. Raises DaemonFailedError."""
    command = serve_command(["--model", str(model), "--drain-timeout-s", str(_DRAIN_TIMEOUT_S), *flags])
    with log.open("wb") as stderr:
        process = await children.start(*command, stderr=stderr, env=environment(log.parent))
    child = DaemonChild(children, process, log)
    reading: asyncio.Task[None] | None = None
    try:
        await child.wait_serving(timeout_s)
        reading = asyncio.create_task(child.read_on())
        yield child
    finally:
        await child.kill()
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])


def environment(scratch: Path) -> Mapping[str, str]:
    """The user's environment, because it may cause the fault, except for temporary files, which killed processes leave
    behind: those go to `scratch`, if a socket's path is not too long there. The model is a directory, so no hub is
    used."""
    fits = len(os.fsencode(scratch / ("x" * _SOCKET_NAME_BYTES))) <= _MAX_SOCKET_PATH_BYTES
    return {**os.environ, **_OFFLINE, **({"TMPDIR": str(scratch)} if fits else {})}
