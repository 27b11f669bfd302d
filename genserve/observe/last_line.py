"""The last line of a terminal, while it is one that is rewritten. What genserve writes next erases it first; what a
library or another process writes follows in the same line."""

import logging
import os
import sys
from contextlib import suppress
from typing import Final, TextIO

_ERASE: Final = "\r\x1b[K"
_USUAL_COLUMNS: Final = 80


class _LastLine:
    is_open = False
    """Whether there is one."""


def rewrite_last(line: str) -> None:
    """Writes a line to stderr in place of the one that this function has written last. Raises OSError."""
    shown = line[: _num_columns() - 1]  # one that wraps could not be erased
    print(f"{erased()}{shown}", end="", file=sys.stderr, flush=True)
    _LastLine.is_open = True


def _num_columns() -> int:
    """Of the terminal behind stderr: stdout may be a file, or another one."""
    with suppress(OSError):  # it has no size
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    return _USUAL_COLUMNS


def erased() -> str:
    """The control sequence that erases that line before the next output on stderr; "" if there is no line."""
    is_open, _LastLine.is_open = _LastLine.is_open, False
    return _ERASE if is_open else ""


class ErasingHandler(logging.StreamHandler[TextIO]):
    """Logs to stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and before it what erases the last one."""
        return f"{erased()}{super().format(record)}"
