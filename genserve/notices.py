"""What daemons and routers tell people on stderr."""

import sys
import time
from contextlib import suppress

from genserve.log_lines import PREFIX, is_json, json_line


def say(line: str) -> None:
    """Writes one line. Who read stderr may be gone: that must not keep a process from what it tells about, which may be
    its end."""
    written = json_line("INFO", "genserve", line, time.time()) if is_json() else f"{PREFIX}{line}"
    with suppress(OSError):
        print(written, file=sys.stderr, flush=True)
