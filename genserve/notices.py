"""What daemons and routers tell people on stderr."""

import sys
from contextlib import suppress

from genserve.log_lines import PREFIX


def say(line: str) -> None:
    """Writes one line. Who read stderr may be gone: that must not keep a process from what it tells about, which may be
    its end."""
    with suppress(OSError):
        print(f"{PREFIX}{line}", file=sys.stderr, flush=True)
