"""Executes a command that gets SIGTERM from the kernel when the process that started it ends, however it ends.

Run it as a program, with the id of the starting process and the command. A process must request this itself, and
Python's hook for it (preexec_fn) would have to fork a process that has threads. The kernel watches the thread that
started the command, not the process: start it in a thread that lives as long.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """The command that becomes `command`. It needs no package of ours, nor anything else that is installed."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def become(starter: int, command: Sequence[str]) -> None:
    """Executes the command. Returns only if the starting process has already ended. Raises OSError."""
    if ends_with(starter):
        os.execvp(command[0], list(command))


def ends_with(starter: int) -> bool:
    """From here on this process gets SIGTERM when its parent ends. Returns whether that still is the starting process.
    Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == starter


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
