"""Lines that daemons and routers write to stderr for people."""

import re
import sys
import time
from contextlib import suppress
from typing import Final, TextIO

from genserve.observe.last_line import erased, rewrite_last
from genserve.observe.log_lines import LEVELS, PREFIX, as_text, is_json, json_line

_STARTING: Final = re.compile(rf"{PREFIX}starting the engine for .*; (\S+) tells how far it is")


def say(line: str) -> None:
    """Writes one line. The reader of stderr may be gone: that must not keep a process from what it reports, which may
    be its end."""
    written = _as_json(line) if is_json() else f"{PREFIX}{line}"
    with suppress(OSError):
        print(f"{erased()}{written}", file=sys.stderr, flush=True)


def can_rewrite(output: TextIO) -> bool:
    """Whether a person reads it in a terminal."""
    return output.isatty() and not is_json()


def rewrite(line: str) -> None:
    """Writes a line to the terminal in place of the last one, if this function has written that. `say`, too, writes in
    its place."""
    with suppress(OSError):
        rewrite_last(f"{PREFIX}{line}")


def say_starting(model: str, address: str) -> None:
    """Says that a daemon listens, and has no engine yet."""
    say(f"starting the engine for {model}; {address} tells how far it is")


def starting_at(line: str) -> str | None:
    """The address in a line that `say_starting` has written; None for any other line."""
    found = _STARTING.fullmatch(as_text(line.strip()))
    return None if found is None else found[1]


def _as_json(line: str) -> str:
    """A line that begins with a level has this level, so that programs find it there."""
    begin = next((level for level in LEVELS if line.startswith(level)), "info: ")
    return json_line(begin.removesuffix(": ").upper(), "genserve", line.removeprefix(begin), time.time())
