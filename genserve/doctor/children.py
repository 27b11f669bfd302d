"""Processes that the doctor starts, each with its descendants in its own process group, so that none is left behind.

A terminal sends Ctrl-C only to its foreground group: the doctor gets it and ends the others. If the doctor is killed,
the kernel ends them (see `launch`).
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
    """Starts processes inside a `with` block, and kills those that are alive at its end, however it ends. This does not
    need the event loop, which a second Ctrl-C may have ended."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    async def start(
        self, *command: str, stderr: IO[bytes] | int, stdin: int = asyncio.subprocess.DEVNULL, env: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Starts a process. Its stdout is a pipe. It gets SIGTERM when this process ends. Raises OSError."""
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
        self._kill(process.pid)
        try:
            async with asyncio.timeout(_KILLED_TIMEOUT_S):
                await process.wait()
        except TimeoutError:  # it hangs in the kernel, for example in a driver, and cannot be killed
            return None
        self._groups.discard(process.pid)
        return status

    def _remember(self, started: "asyncio.Future[asyncio.subprocess.Process]") -> None:
        if not started.cancelled() and started.exception() is None:
            self._groups.add(started.result().pid)

    def _kill(self, group: int) -> None:
        """Kills Python's resource trackers last: they remove the shared memory and semaphores of the others."""
        members = members_of(group)
        trackers = [pid for pid in members if _is_resource_tracker(pid)]
        if trackers:
            for pid in set(members) - set(trackers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait(trackers, _TRACKERS_TIMEOUT_S)
        if members_of(group):  # otherwise the id may belong to another group by now
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


def _wait(pids: Sequence[int], timeout_s: float) -> None:
    """Waits until these processes have ended or the time is over, without the event loop."""
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
    """The processes of a group that have not ended. A zombie does not count: if nothing waits for orphans, it stays."""
    members = []
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, _, process_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members
