"""A router in a process of its own, as a user starts it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.patience import START_S


class RouterProcess:
    """`genserve route`. `address` is where it listens."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "genserve", "route", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                process_group=0,
            )
        timer = threading.Timer(START_S, self.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        timer.cancel()
        if " on " not in line:
            raise AssertionError(f"the router ended with {self.process.wait()}:\n{log.read_text()[-4000:]}")
        self.address = line.rsplit(" on ", 1)[1].strip()

    def kill(self) -> None:
        """Ends it, without a word."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Asks it to drain; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
