"""Becomes a command that ends with the process that started it, whatever ends that one: the kernel sends it SIGTERM.

Run as a program: the number of that process, and the command. A process has to ask for this itself, and Python's hook
for it (preexec_fn) would have to fork a process that has threads. The kernel means the thread that started the command,
not the process: let one start it that lives as long.
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
    """Returns only when the starter has ended already. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == starter:
        os.execvp(command[0], list(command))


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
