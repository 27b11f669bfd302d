"""Standard input and output: neither their encoding nor their absence ends a command with a traceback."""

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from genserve.errors import InvalidFieldError

if TYPE_CHECKING:
    from google.protobuf.message import Message


def prepare_output() -> None:
    """Opens /dev/null for a standard stream that was closed (`>&-`), so that no socket gets its descriptor. Characters
    that the encoding of stdout lacks are written as escapes."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _reopen_null(fd)
            setattr(sys, name, open(fd, "w" if fd > 0 else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def abandon_output(*streams: TextIO) -> None:
    """Points streams without a reader to /dev/null, because Python flushes them again at exit."""
    for stream in streams or (sys.stdout, sys.stderr):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def read_input() -> str:
    """All of standard input. Raises InvalidFieldError if it is not text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidFieldError.of("prompt", f"standard input is not {error.encoding}: {error.reason}") from error


def _reopen_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)


def print_json(message: "Message", **more: Any) -> None:
    """Prints a message as one line of protobuf JSON, with `more` in it. Zeros are written too: a program that reads the
    version 0 should not have to know that it may be missing."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(message, always_print_fields_with_no_presence=True)
    print(json.dumps({**fields, **more}), flush=True)
