"""The daemon's own processes, from /proc: a trainer must not pass files that they have open."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import psutil

FileId: TypeAlias = tuple[int, int]
"""Device and inode: equal for two descriptors of one file, whatever they are called."""


def file_id(found: os.stat_result) -> FileId:
    """The identity of a result of `os.stat`."""
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class DaemonProcesses:
    """The process `root_pid` and its descendants. A descendant whose parent has died does not count any more."""

    root_pid: int = field(default_factory=os.getpid)

    def include(self, pid: int) -> bool:
        """Whether a process, or the process of a thread, is one of them: /proc/TID works like /proc/PID. Raises OSError
        if there is none."""
        while True:
            leader, pid = _leader_and_parent(pid)
            if leader == self.root_pid:
                return True
            if pid == 0:  # the first process, or one that was started outside of this PID namespace
                return False

    def descriptors_of(self, wanted: FileId) -> Iterator[tuple[int, int]]:
        """Process and number of each of their descriptors of this file. Takes milliseconds: call it in a thread.

        A zombie belongs to root alone and has nothing open.
        """
        for process in [psutil.Process(self.root_pid), *psutil.Process(self.root_pid).children(recursive=True)]:
            try:
                numbers = os.listdir(f"/proc/{process.pid}/fd")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended and has nothing open
            except PermissionError:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                raise
            for number in numbers:
                try:
                    found = os.stat(f"/proc/{process.pid}/fd/{number}")
                except (FileNotFoundError, ProcessLookupError):
                    continue  # closed meanwhile
                if file_id(found) == wanted:
                    yield process.pid, int(number)


def _leader_and_parent(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["Tgid"]), int(fields["PPid"])
