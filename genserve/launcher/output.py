"""The output of a daemon: its address, the reason of its end, and the sink for all lines."""

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

from genserve.observe.log_lines import LEVELS, PREFIX, as_text

_SERVING_PREFIX: Final = "genserve: serving "
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
        text = line.decode(errors="replace")
        if not text.startswith(_SERVING_PREFIX):
            return None
        model, _, address = text.strip()[len(_SERVING_PREFIX) :].rpartition(" on ")
        return cls(model, address)


class DaemonOutput(Protocol):
    """Sink for a daemon's output. The daemon inherits `stderr`; the thread that reads its stdout writes that here."""

    @property
    def path(self) -> Path:
        """The file that has the output, or a name of it."""

    @property
    def hint(self) -> str:
        """The end of an error, which names the file: " (log: PATH)"; "" if there is none to name."""

    @property
    def stderr(self) -> int:
        """A file that the daemon inherits."""

    def write(self, chunk: bytes, /) -> object:
        """Takes what it says on stdout. May raise OSError."""

    def last_words(self) -> str:
        """As the function of this name. Raises OSError."""

    def close(self) -> None:
        """The daemon has ended."""


class LogFile:
    """Everything in one file. Raises OSError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hint = f" (log: {path})"
        path.open("wb").close()
        self._file = path.open("ab", buffering=0)  # the daemon and the thread that reads its stdout append to it

    @property
    def stderr(self) -> int:
        """The file."""
        return self._file.fileno()

    def write(self, chunk: bytes) -> object:
        """Appends."""
        return self._file.write(chunk)

    def last_words(self) -> str:
        """Those in the file."""
        return last_words(self.path)

    def close(self) -> None:
        """Closes the file, which can still be read."""
        self._file.close()


class _Stdout(Protocol):
    def fileno(self) -> int: ...


class _Log(Protocol):
    def write(self, chunk: bytes, /) -> object: ...


class StdoutReader:
    """Reads a daemon's stdout into its log, and finds where it serves."""

    def __init__(self, stdout: _Stdout, log: _Log, serving: Future[Serving]) -> None:
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
    """`words_of` the end of a log; "" if the log was removed. Raises OSError."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return words_of(file.read())
    except FileNotFoundError:
        return ""


def words_of(said: bytes) -> str:
    """ ": " and why a daemon ended, in one line: the last line of its own on stderr, if possible one that it has not
    logged as a warning or an error, or the last lines of others; "" if there is none."""
    stripped = (line.strip() for line in said.decode(errors="replace").splitlines())
    # That it serves comes by stdout, perhaps after its last line on stderr.
    lines = [as_text(line) for line in stripped if line and not line.startswith(_SERVING_PREFIX)]
    own = [line.removeprefix(prefix) for line in lines for prefix in _OWN_PREFIXES if line.startswith(prefix)]
    plain = [line for line in own if not line.startswith(LEVELS)] or own
    words = plain[-1] if plain else "; ".join(lines[-_TAIL_LINES:])
    return f": {words}" if words else ""
