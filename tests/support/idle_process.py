"""A process that does nothing."""

import subprocess
from functools import cache


@cache
def idle_process() -> "subprocess.Popen[bytes]":
    """A process that does nothing, and ends with this one, which holds the other end of its input."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
