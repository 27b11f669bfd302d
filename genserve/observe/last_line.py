"""The last line of a terminal, while it is one that is rewritten. Whoever writes another line erases it first."""

import logging
import shutil
import sys
from typing import Final, TextIO

_ERASE: Final = "\r\x1b[K"


class _LastLine:
    is_open = False
    """Whether there is one."""


def rewrite_last(line: str) -> None:
    """Writes a line to stderr in place of the one that this function has written last. Raises OSError."""
    shown = line[: shutil.get_terminal_size().columns - 1]  # one that wraps could not be erased
    print(f"{erased()}{shown}", end="", file=sys.stderr, flush=True)
    _LastLine.is_open = True


def erased() -> str:
    """What erases that line, for whoever writes to stderr next; "" if there is none."""
    is_open, _LastLine.is_open = _LastLine.is_open, False
    return _ERASE if is_open else ""


class ErasingHandler(logging.StreamHandler[TextIO]):
    """Logs to stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and before it what erases the last one."""
        return f"{erased()}{super().format(record)}"
