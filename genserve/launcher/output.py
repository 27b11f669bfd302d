"""What a daemon says: where it serves, and why it has ended."""

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from genserve.log_lines import LEVELS, PREFIX

_SERVING_PREFIX: Final = b"genserve: serving "
_OWN_PREFIXES: Final = (PREFIX, "genserve serve: error: ")
_NUM_LAST_READS: Final = 256
_READ_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 64 << 10
_TAIL_LINES: Final = 3
"""Of what others have said. Of its own lines a daemon's last one says why it ended."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The line that a daemon writes to stdout when it serves. `model` is what `--model` said, or where the built-in
    model lies; `address` is as clients take it."""

    model: str
    address: str

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """None for any other line."""
        if not line.startswith(_SERVING_PREFIX):
            return None
        model, _, address = line.decode(errors="replace").strip()[len(_SERVING_PREFIX) :].rpartition(" on ")
        return cls(model, address)


class StdoutReader:
    """Reads a daemon's stdout into its log, and finds where it serves."""

    def __init__(self, stdout: IO[bytes], log: IO[bytes], serving: Future[Serving]) -> None:
        self.fd: Final = stdout.fileno()
        os.set_blocking(self.fd, False)
        self._log = log
        self._serving = serving
        self._line = b""
        self.is_open = True

    def read(self) -> bool:
        """Reads some of what there is; False if there is nothing."""
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self.is_open = chunk != b""
        with suppress(OSError):  # a daemon must not stand still because the disk of its log is full
            self._log.write(chunk)
        if not self._serving.done():
            *lines, rest = (self._line + chunk).split(b"\n")
            self._line = rest[:_READ_BYTES]  # of a line that does not end its beginning is enough
            if (serving := next(filter(None, map(Serving.parse, lines)), None)) is not None:
                self._serving.set_result(serving)
        return self.is_open

    def read_rest(self) -> None:
        """Reads what there is. Others than the daemon may go on writing: not without end."""
        for _ in range(_NUM_LAST_READS):
            if not self.read():
                return


def last_words(log: Path) -> str:
    """ ": " and why a daemon ended, in one line: the last line of its own on stderr, if possible one that it has not
    logged as a warning or an error, or the last lines of others; "" if there is none, or the log was removed. Raises
    OSError."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix(prefix) for line in lines for prefix in _OWN_PREFIXES if line.startswith(prefix)]
    said = [line for line in own if not line.startswith(LEVELS)] or own
    words = said[-1] if said else "; ".join(lines[-_TAIL_LINES:])
    return f": {words}" if words else ""
