"""A daemon as users start it, with `genserve serve`, in a separate process."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from genserve.doctor.children import Children
from genserve.launcher.daemon_process import DaemonProcess
from genserve.launcher.output import LogFile, last_words
from genserve.process.signals import ending

_STOP_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 10.0
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_MAX_SOCKET_PATH_BYTES: Final = 107  # of Linux
_SOCKET_NAME_BYTES: Final = 36  # vLLM's are UUIDs


class _StderrFile(LogFile):
    """Only stderr, whose last line says why a daemon ended, in a file that is removed with the trial."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hint = ""

    def write(self, chunk: bytes) -> object:
        """Drops stdout."""
        return None


class DaemonChild:
    """A daemon that serves at `address`. `stop` may be called once; leaving the context kills what is left."""

    def __init__(self, process: DaemonProcess, address: str) -> None:
        self.address = address
        self._process = process

    async def stop(self) -> str:
        """Ends the daemon by a signal. Returns what was wrong with its end, "" if nothing."""
        self._process.stop(_STOP_TIMEOUT_S)
        was_killed = await asyncio.wrap_future(self._process.ended)
        status = self._process.exit_status
        if was_killed or status is None:
            return f"it, or a process of it, had to be killed {_STOP_TIMEOUT_S:g} s after SIGTERM"
        return "" if status == 0 else f"it {ending(status)}{self.last_words()}"

    def last_words(self) -> str:
        """As `launcher.output.last_words`."""
        return last_words(self._process.log)


@asynccontextmanager
async def daemon(
    children: Children, model: Path, flags: Sequence[str], log: Path, timeout_s: float
) -> AsyncIterator[DaemonChild]:
    """A daemon that serves `model`, with its stderr in the file `log`. Raises DaemonFailedError."""
    flags = ["--model", str(model), "--drain-timeout-s", str(_DRAIN_TIMEOUT_S), *flags]
    process = DaemonProcess(flags, _StderrFile(log), environment(log.parent))
    group = process.process.pid
    children.add(group)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                serving = await asyncio.wrap_future(process.serving)
        except TimeoutError:
            raise process.failure(f"the daemon did not serve within {timeout_s:g} s (--timeout-s)") from None
        yield DaemonChild(process, serving.address)
    finally:
        process.kill()
        await asyncio.wrap_future(process.ended)
        children.discard(group)


def environment(scratch: Path) -> Mapping[str, str]:
    """The user's environment, because it may cause the fault, except for temporary files, which killed processes leave
    behind: those go to `scratch`, if a socket's path is not too long there. The model is a directory, so no hub is
    used."""
    fits = len(os.fsencode(scratch / ("x" * _SOCKET_NAME_BYTES))) <= _MAX_SOCKET_PATH_BYTES
    return {**os.environ, **_OFFLINE, **({"TMPDIR": str(scratch)} if fits else {})}
