"""`genserve up` in a process of its own, with the daemons that it starts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from genserve.client import Client, FleetReplica
from genserve.launcher.process_group import members_of
from tests.support.patience import START_S
from tests.support.warm.process import WarmPopen


class UpProcess:
    """`genserve up` on a free port. `cold` starts Python interpreters for it and its daemons, in ten times the time."""

    def __init__(self, flags: Sequence[str], log: Path, *, cold: bool = False) -> None:
        self._log = log
        self._groups: set[int] = set()
        # Several test processes bind their engines to cores, and `up` leaves alone what somebody else shares out.
        env = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_OMP_THREADS_BIND"}
        with log.open("wb") as stderr:
            self.process = (subprocess.Popen if cold else WarmPopen)(
                [sys.executable, "-m", "genserve", "up", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                text=True,
                process_group=0,
            )

    @property
    def stderr(self) -> str:
        """What it and its daemons said on stderr."""
        return self._log.read_text(errors="replace")

    @property
    def daemons(self) -> list[int]:
        """The processes of the daemons that run."""
        found = []
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " genserve serve " in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each.pid)
        self._groups.update(found)
        return found

    def address(self) -> str:
        """Where the router listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " on " not in line:
            raise AssertionError(f"up ended with {self.process.wait(60)}:\n{self.stderr[-4000:]}")
        return line.rsplit(" on ", 1)[1].strip()

    def until(self, holds: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Waits until something holds."""
        until_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise AssertionError(f"it does not come true; up: {self.process.poll()}\n{self.stderr[-4000:]}")
            time.sleep(0.05)

    def until_ready(self, client: Client, count: int) -> list[FleetReplica]:
        """Waits until so many replicas get requests, and no other is known."""
        self.until(lambda: [each.state for each in client.list_replicas().replicas] == ["ready"] * count)
        return list(client.list_replicas().replicas)

    def until_said(self, pattern: str) -> None:
        """Waits until it, or a daemon, has said so on stderr."""
        self.until(lambda: re.search(pattern, self.stderr, re.MULTILINE) is not None)

    def left(self, timeout_s: float = 60.0) -> list[int]:
        """The processes that are there when they had some time to end: of all daemons that `daemons` has seen."""
        until_s = time.monotonic() + timeout_s
        while (left := [pid for group in self._groups for pid in members_of(group)]) and time.monotonic() < until_s:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        """Ends everything, whatever it is doing."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._groups.update(self.daemons)
        self.process.kill()
        self.process.communicate()
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
