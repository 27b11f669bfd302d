"""The process group of a daemon: lists, kills and awaits its members."""

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_TRACKERS_TIMEOUT_S: Final = 2.0


def members_of(group: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of a group that have not ended. A zombie does not count: if nothing waits for orphans, it stays."""
    members = []
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, _, process_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members


def kill_group(group: int) -> None:
    """Kills Python's resource trackers last: they remove the shared memory and semaphores of the others."""
    members = members_of(group)
    trackers = [pid for pid in members if _is_resource_tracker(pid)]
    if trackers:
        for pid in set(members) - set(trackers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_ended(trackers, _TRACKERS_TIMEOUT_S)
    if members_of(group):  # otherwise the id may belong to another group by now
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def wait_ended(pids: Sequence[int], timeout_s: float) -> None:
    """Until those processes, which need not be children, have ended, or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            watched = select.poll()  # select takes no descriptor above 1023
            watched.register(fd, select.POLLIN)
            watched.poll(1000 * max(0.0, deadline_s - time.monotonic()))
        finally:
            os.close(fd)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended meanwhile
        return False
