"""What daemons and routers tell people on stderr."""

import sys
import time
from contextlib import suppress

from genserve.log_lines import LEVELS, PREFIX, is_json, json_line


def say(line: str) -> None:
    """Writes one line. Who read stderr may be gone: that must not keep a process from what it tells about, which may be
    its end."""
    written = _as_json(line) if is_json() else f"{PREFIX}{line}"
    with suppress(OSError):
        print(written, file=sys.stderr, flush=True)


def _as_json(line: str) -> str:
    """A line that begins with a level has this level, so that programs find it there."""
    begin = next((level for level in LEVELS if line.startswith(level)), "info: ")
    return json_line(begin.removesuffix(": ").upper(), "genserve", line.removeprefix(begin), time.time())
