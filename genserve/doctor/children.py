"""Processes that the doctor starts, each with its descendants in its own process group, so that none is left behind.

A terminal sends Ctrl-C only to its foreground group: the doctor gets it and ends the others. If the doctor is killed,
the kernel ends them (see `launcher.end_with_starter`).
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Final, Self

from genserve.launcher.end_with_starter import ending_with_this_process
from genserve.launcher.process_group import kill_group, members_of

_STDOUT_LIMIT_BYTES: Final = 1 << 20
_KILLED_TIMEOUT_S: Final = 10.0


class Children:
    """Starts processes inside a `with` block, and kills those that are alive at its end, however it ends. This does not
    need the event loop, which a second Ctrl-C may have ended."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    async def start(
        self, *command: str, stderr: IO[bytes] | int, stdin: int = asyncio.subprocess.DEVNULL, env: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Starts a process. Its stdout is a pipe. It gets SIGTERM when this process ends. Raises OSError."""
        arguments: Any = {"process_group": 0}
        starting = asyncio.create_subprocess_exec(
            *ending_with_this_process(command),
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=dict(env),
            limit=_STDOUT_LIMIT_BYTES,
            **arguments,
        )
        task = asyncio.ensure_future(starting)
        task.add_done_callback(self._remember)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Starting a process in asyncio cannot be cancelled: the end of the loop would wait for it for ever.
            await asyncio.wait([task])
            raise

    async def stop(self, process: asyncio.subprocess.Process, timeout_s: float) -> int | None:
        """Asks a process to end. Returns its exit status, or None if it, or a descendant, had to be killed."""
        status: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                with suppress(ProcessLookupError):
                    process.terminate()
                ended = await process.wait()
                while members := members_of(process.pid):
                    await _end_of(members[0])
                status = ended
        kill_group(process.pid)
        try:
            async with asyncio.timeout(_KILLED_TIMEOUT_S):
                await process.wait()
        except TimeoutError:  # it hangs in the kernel, for example in a driver, and cannot be killed
            return None
        self._groups.discard(process.pid)
        return status

    def add(self, group: int) -> None:
        """A process group that others have started, and end unless this block is left before."""
        self._groups.add(group)

    def discard(self, group: int) -> None:
        """It has ended: its number may be another one's."""
        self._groups.discard(group)

    def _remember(self, started: "asyncio.Future[asyncio.subprocess.Process]") -> None:
        if not started.cancelled() and started.exception() is None:
            self._groups.add(started.result().pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group in self._groups:
            kill_group(group)
        self._groups.clear()


async def _end_of(pid: int) -> None:
    """Returns when this process, which need not be a child, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
