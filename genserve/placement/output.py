"""The output of replicas, on stderr, each line with the number of its replica."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from genserve.launcher.output import words_of
from genserve.observe.last_line import erased
from genserve.observe.notices import starting_at

READ_BYTES: Final = 64 << 10
_LONGEST_LINE_BYTES: Final = 64 << 10
_NUM_LAST_LINES: Final = 200


class PrefixedOutput:
    """The launcher's DaemonOutput: a thread reads a pipe and writes whole lines. `to`: this process's stderr. `listens`
    is called, in that thread, with the address of a daemon that has no engine yet."""

    path: Final = Path("/dev/stderr")
    hint: Final = ""

    def __init__(
        self, prefix: str, to: IO[bytes] | None = None, listens: Callable[[str], object] | None = None
    ) -> None:
        self._listens = listens
        self._prefix = prefix.encode()
        self._to = sys.stderr.buffer if to is None else to
        self._last: deque[bytes] = deque(maxlen=_NUM_LAST_LINES)
        self._is_closed = False
        reading, self._writing = os.pipe()
        self._thread = threading.Thread(
            target=self._copy, args=(os.fdopen(reading, "rb", buffering=0),), name="genserve-output", daemon=True
        )
        self._thread.start()

    @property
    def stderr(self) -> int:
        """The pipe."""
        return self._writing

    def write(self, chunk: bytes) -> object:
        """Goes the way of stderr, so that lines stay whole."""
        return os.write(self._writing, chunk)

    @property
    def last_line(self) -> str:
        """The last line, "" before the first one."""
        return self._last[-1].decode(errors="replace").strip() if self._last else ""

    def last_words(self) -> str:
        """Those of the last lines."""
        return words_of(b"".join(self._last))

    def close(self) -> None:
        """All that was said is written, unless a process that is not the daemon's keeps the pipe open. May be
        repeated."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._writing)
        self._thread.join(timeout=1.0)

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            rest = b""
            while chunk := pipe.read(READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                self._show([line + b"\n" for line in lines])
                if len(rest) > _LONGEST_LINE_BYTES:  # a progress bar
                    rest = rest[-_LONGEST_LINE_BYTES:]
            self._show([rest + b"\n"] if rest else [])

    def _show(self, lines: list[bytes]) -> None:
        self._last.extend(lines)
        for line in lines if self._listens is not None else ():
            if (address := starting_at(line.decode(errors="replace"))) is not None:
                self._tell(address)
        if lines:
            with suppress(OSError, ValueError):  # nobody reads it any more, or this process ends
                self._to.write(erased().encode() + b"".join(self._prefix + line for line in lines))
                self._to.flush()

    def _tell(self, address: str) -> None:
        if (listens := self._listens) is not None:
            self._listens = None  # it says so once
            with suppress(RuntimeError):  # the event loop is closed
                listens(address)
