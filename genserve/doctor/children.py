"""Processes that the doctor starts, each with its descendants in a group of its own, so that none is left behind.

A terminal sends Ctrl-C to its foreground group alone: the doctor gets it, and ends the others. A doctor that is killed
cannot; then the kernel does (see `launcher.end_with_starter`).
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
    """Started inside `with`; whatever lives at its end is killed, however it ends. It does not need the event loop for
    that: a second Ctrl-C may have ended it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    async def start(
        self, *command: str, stderr: IO[bytes] | int, stdin: int = asyncio.subprocess.DEVNULL, env: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Its stdout is a pipe. It gets SIGTERM when this process ends. Raises OSError."""
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
            # asyncio's start takes no cancelling: the end of the loop would wait for it for ever.
            await asyncio.wait([task])
            raise

    async def stop(self, process: asyncio.subprocess.Process, timeout_s: float) -> int | None:
        """Asks it to end; its exit status, or None when it, or a descendant, had to be killed."""
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
        except TimeoutError:  # it hangs in the kernel, in a driver say, and nothing can be done about it
            return None
        self._groups.discard(process.pid)
        return status

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
    """Returns when that process, which need not be a child, has ended."""
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
