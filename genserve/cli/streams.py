"""Standard input and output, so that neither their encoding nor their absence ends a command with a traceback."""

import io
import os
import sys
from typing import TextIO

from genserve.errors import InvalidFieldError


def prepare_output() -> None:
    """Opens /dev/null for a standard stream that was closed (`>&-`), lest a socket take its place; has what an encoding
    cannot hold written as an escape."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _reopen_null(fd)
            setattr(sys, name, open(fd, "w" if fd > 0 else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def abandon_output(*streams: TextIO) -> None:
    """After their reader has gone: Python flushes them once more at exit, and must find somebody there."""
    for stream in streams or (sys.stdout, sys.stderr):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def read_input() -> str:
    """All of standard input. Raises InvalidFieldError when it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidFieldError.of("prompt", f"standard input is not {error.encoding}: {error.reason}") from error


def _reopen_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)
