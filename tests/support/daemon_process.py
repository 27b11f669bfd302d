"""A daemon in a process of its own, as a user starts it."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.support.known_secrets import check_arguments
from tests.support.patience import START_S
from tests.support.warm.process import WarmPopen

START_TIMEOUT_S = START_S
SMALL_ENGINE = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20))
"""Flags that make the engine of a tiny model small. Its KV cache has room for more than 100,000 tokens of most of them:
all of it becomes resident at the start, which is a third of what a start costs."""
BOTH_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""The environment of an engine of two ranks on a machine of two cores."""


class DaemonProcess:
    """`genserve serve` on a free port. `address` is where it serves, `stderr` what it has said so far; `within` is the
    beginning of a command that runs the rest of it elsewhere. `cold` starts a Python interpreter for it, in ten times
    the time: for what a start itself does."""

    def __init__(
        self,
        flags: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
        *,
        cold: bool = False,
    ) -> None:
        self._log = log
        port = () if "--port" in flags else ("--port", "0")
        with log.open("wb") as stderr:
            self.process = (subprocess.Popen if cold else WarmPopen)(
                [*within, sys.executable, "-m", "genserve", "serve", *port, *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                text=True,
                # A group, to be killed as one, and not a session: Linux shares CPUs out by session, and with two on two
                # cores the test may not run for seconds while the engine does.
                process_group=0,
            )
        self.address = ""
        self.has_ended = False
        """A test has seen its end, or has killed it."""

    def wait_serving(self, timeout_s: float | None = None) -> Self:
        """Waits for the line that says where it serves; None = START_TIMEOUT_S as it is now, which tests/gpu raises."""
        limit_s = START_TIMEOUT_S if timeout_s is None else timeout_s
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith("genserve: serving "):
                    self.address = line.rsplit(" on ", 1)[1].strip()
                    check_arguments(self.process.pid)
                    return self
        finally:
            timer.cancel()
        ended = f"ended with {self.process.wait()}"
        what = f"did not serve within {limit_s:g} s and was killed" if is_late.is_set() else ended
        raise AssertionError(f"the daemon {what}:\n{self.stderr[-4000:]}")

    def wait_listening(self) -> str:
        """Waits until it says where it listens, which it does before its engine starts; the address."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(r"starting the engine for .*; (\S+) tells how far it is", self.stderr)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.stderr[-4000:]
            time.sleep(0.02)
        return found[1]

    @property
    def stderr(self) -> str:
        """What it said on stderr."""
        return self._log.read_text(errors="replace")

    async def until_said(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until it has said so on stderr."""
        async with asyncio.timeout(timeout_s):
            while text not in self.stderr:
                await asyncio.sleep(0.02)

    def descendant(self, name: str) -> psutil.Process:
        """The process of its engine that vLLM calls so."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in found if name in each.name() or name in "".join(each.cmdline()))

    def stop(self, timeout_s: float = 60.0) -> int:
        """Asks it to drain, and waits; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.exit_status(timeout_s)
        finally:
            self.kill()

    def exit_status(self, timeout_s: float) -> int:
        """Waits until it has ended, which the test wants."""
        status = self.process.wait(timeout_s)
        self.has_ended = True
        return status

    def end(self) -> None:
        """Asks it to drain, and goes on; `wait_ended` waits, and fails if it has ended otherwise. One that does not
        serve yet is killed."""
        if self.address == "" or self.has_ended:
            self.kill()
        elif self not in ending:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            ending.append(self)

    def kill(self) -> None:
        """Ends it and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.has_ended = True

    def check_drained(self) -> None:
        """Waits until it has ended as `end` asks. Raises AssertionError if it does not, or its exit status is not 0."""
        try:
            ended = f"ended with {self.process.wait(60.0)}"
        except subprocess.TimeoutExpired:
            ended = "did not end"
        self.kill()
        assert ended == "ended with 0", f"{self._log}: it was to drain, and {ended}:\n{self.stderr[-4000:]}"


ending: list[DaemonProcess] = []
"""Those that `end` has asked."""


def wait_ended() -> None:
    """Waits for each daemon that was asked to end. Raises an ExceptionGroup of what `check_drained` raises."""
    failures: list[AssertionError] = []
    while ending:
        try:
            ending.pop().check_drained()
        except AssertionError as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("daemons that did not end as asked", failures)
