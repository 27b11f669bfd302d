"""Which processes can open each other's memory: those on one host, in one PID namespace and of one user."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from genserve.net import is_local

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME = 19  # in /proc/PID/stat, behind the command's name


def can_share(target: str, daemon_host_id: str) -> bool:
    """Whether the daemon at `target` can open this process's memory; `daemon_host_id` is what it says of itself. A
    daemon behind a proxy on this host has another id: bytes are sent then."""
    return daemon_host_id != "" and is_local(target) and daemon_host_id == host_id()


def host_id() -> str:
    """Equal for processes that can share memory, as in `GetServerInfoResponse.host_id`: the kernel's boot, the PID
    namespace, the user. "" if the kernel is not Linux."""
    try:
        return f"{BOOT_ID.read_text().strip()}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from any other one that has the same PID elsewhere or later. `start_time`: clock ticks
    since the boot."""

    host_id: str
    pid: int
    start_time: int

    @classmethod
    def own(cls) -> Self:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Self:
        """A process that runs here. Raises OSError if there is none."""
        return cls(host_id(), pid, _start_time(pid))

    @property
    def is_here(self) -> bool:
        """Whether it runs where this process can open its memory, as /proc/PID/fd/FD."""
        if not self.host_id or self.host_id != host_id():
            return False
        try:
            return _start_time(self.pid) == self.start_time
        except OSError:
            return False


def _start_time(pid: int) -> int:
    # The command's name is in parentheses, and may contain any character.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[_START_TIME])
