"""Processes that the doctor starts, each with its descendants in a group of its own, so that none is left behind.

A terminal sends Ctrl-C to its foreground group alone: the doctor gets it, and ends the others. A doctor that is killed
cannot; then the kernel does (see `launch`).
"""

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

_STDOUT_LIMIT_BYTES: Final = 1 << 20
_KILLED_TIMEOUT_S: Final = 10.0
_TRACKERS_TIMEOUT_S: Final = 2.0


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
        launched = (sys.executable, "-m", "genserve.doctor.launch", str(os.getpid()), *command)
        starting = asyncio.create_subprocess_exec(
            *launched,
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
        self._kill(process.pid)
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

    def _kill(self, group: int) -> None:
        """Python's resource trackers come last: they remove shared memory and semaphores that the others have left."""
        members = members_of(group)
        trackers = [pid for pid in members if _is_resource_tracker(pid)]
        if trackers:
            for pid in set(members) - set(trackers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait(trackers, _TRACKERS_TIMEOUT_S)
        if members_of(group):  # else the number may be somebody else's by now
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group in self._groups:
            self._kill(group)
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


def _wait(pids: Sequence[int], timeout_s: float) -> None:
    """Until those processes have ended, or the time is over; without the event loop."""
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
        finally:
            os.close(fd)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended meanwhile
        return False


def members_of(group: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of a group that have not ended. One that has and was not waited for is nobody's any more, and stays
    where there is no process that waits for orphans."""
    members = []
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, _, process_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members
