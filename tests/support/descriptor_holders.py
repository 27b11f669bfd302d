"""Processes that have descriptors of this one open as well."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child(*fds: int) -> Iterator["subprocess.Popen[bytes]"]:
    """One that ends with its input."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds) as process:
        yield process


@contextmanager
def stranger(*fds: int) -> Iterator[int]:
    """The PID of one that is not a descendant of this process: its parent has ended."""
    command = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
    pid = int(subprocess.run(command, pass_fds=fds, stdout=subprocess.PIPE, check=True).stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
