"""A daemon in a separate process, `genserve serve`, and the thread that starts, reads and ends it.

Everything that waits does so in that thread, without an event loop, so that blocking code and asyncio have the same to
wait for: two futures.
"""

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from genserve.launcher.end_with_starter import ending_with_this_process
from genserve.launcher.output import DaemonOutput, Serving, StdoutReader
from genserve.launcher.process_group import kill_group, members_of, wait_ended
from genserve.process.signals import ending
from genserve.transport.settings import ConnectionSettings

GIVE_UP_S: Final = 3.0
"""Time to end for a daemon that did not serve in time."""
_LEFT_ALONE_S: Final = 10.0
"""How long the engine's processes may take to end after a daemon that nobody has stopped: they watch for its end."""
_KILLED_TIMEOUT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 3600.0  # poll takes no infinity


class DaemonFailedError(RuntimeError):
    """The daemon did not start, or did not end as it should; the text is one line, with its last words and `log`, where
    all of them are. `exit_status` is None if it was killed, or is not known; -N is signal N."""

    def __init__(self, message: str, log: Path, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.exit_status = exit_status


def serve_command(flags: Sequence[str]) -> list[str]:
    """`genserve serve` by this interpreter, on a free port unless the flags say which."""
    port = () if any(flag.partition("=")[0] == "--port" for flag in flags) else ("--port", "0")
    return [sys.executable, "-m", "genserve", "serve", *port, *flags]


def access_to(flags: Sequence[str]) -> ConnectionSettings:
    """How a client calls a daemon with these flags: what the environment says of TLS is about another one, unless this
    one may have a certificate."""
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    return {} if names & {"--ssl-certfile", "--config"} else {"tls": False}


class DaemonProcess:
    """`genserve serve` with these flags, on a free port unless they say which.

    `serving` is done when it serves, or cannot any more (DaemonFailedError). `ended` is done when it and all that it
    has started have ended, seconds after the time of `stop` is over at the latest; its result says whether any of them
    had to be killed. Both are resolved in every case.

    `output` gets what it says, and is closed when it has ended. `within` is the beginning of a command that runs the
    rest of it. `cpus` are the CPUs that it may run on, None = those of this process. Raises OSError when it cannot be
    started.
    """

    def __init__(
        self,
        flags: Sequence[str],
        output: DaemonOutput,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
        cpus: Collection[int] | None = None,
    ) -> None:
        self.log = output.path
        self._output = output
        self._cpus = cpus
        self.serving: Future[Serving] = Future()
        self.ended: Future[bool] = Future()
        started: Future[subprocess.Popen[bytes]] = Future()
        for future in (self.serving, self.ended, started):
            future.set_running_or_notify_cancel()  # who gives up waiting does not cancel what others wait for
        self._command = ending_with_this_process([*within, *serve_command(flags)])
        self._env = {**os.environ, **({} if env is None else env)}
        self._wake: Final = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._deadline_s = float("inf")
        self._is_stopping = False
        # The kernel ends the daemon with the thread that has started it: this one lives as long as the daemon.
        thread = threading.Thread(target=self._run, args=(started,), name="genserve-daemon", daemon=True)
        thread.start()
        try:
            self.process = started.result()
        except BaseException:  # an interrupt, of this thread and not of the other one
            self.kill()
            raise

    @property
    def exit_status(self) -> int | None:
        """The exit status: None while the daemon runs, -N after signal N."""
        status: int | None = self.process.poll()
        return status

    def stop(self, timeout_s: float) -> None:
        """Asks it to drain, and kills what is left after that time. Does not wait: `ended` tells."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)
        if not self._is_stopping:  # a second signal would be an order to exit at once
            self._is_stopping = True
            self.process.send_signal(signal.SIGTERM)
        self._wake_up()

    def kill(self) -> None:
        """Ends it and everything it has started. Does not wait either."""
        self._deadline_s = 0.0
        self._wake_up()

    def failure(self, what: str = "") -> DaemonFailedError:
        """An error that says what has happened (default: how it has ended), with its last words, unless it has served
        and was shut down in order: then they give no reason."""
        status = self.exit_status
        happened = what or f"the daemon {'hangs in the kernel' if status is None else ending(status)}"
        was_drained = not what and status == 0 and self.serving.done() and self.serving.exception() is None
        words = "" if was_drained else self._output.last_words()
        return DaemonFailedError(f"{happened}{words}{self._output.hint}", self.log, status)

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # What follows runs in the thread.

    def _run(self, started: "Future[subprocess.Popen[bytes]]") -> None:
        process: subprocess.Popen[bytes] | None = None
        try:
            with closing(self._output):
                process = self._start()
                ended = os.pidfd_open(process.pid)
                try:
                    started.set_result(process)
                    was_killed = self._keep(process, ended)
                finally:
                    os.close(ended)
        except BaseException as error:
            if process is not None:
                kill_group(process.pid)
            for future in (started, self.serving, self.ended):
                if not future.done():
                    future.set_exception(error)
        else:
            self.ended.set_result(was_killed)

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)  # of this thread, and of what it starts
        return subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._output.stderr,
            env=self._env,
            # A group: an interrupt from the terminal is the starter's, who lets the daemon drain; and what is left is
            # killed as one. Not a session: Linux shares CPUs out by session, and with two on two cores the starter may
            # not run for seconds while the engine does.
            process_group=0,
        )

    def _keep(self, process: "subprocess.Popen[bytes]", ended: int) -> bool:
        """From its start to the end of all that it has started; whether any had to be killed."""
        assert process.stdout is not None
        with process.stdout:
            stdout = StdoutReader(process.stdout, self._output, self.serving)
            in_order = self._wait(ended, stdout)
            if in_order:
                process.wait()
                stdout.read_rest()
                self._deadline_s = min(self._deadline_s, time.monotonic() + _LEFT_ALONE_S)
                # Who waits for a start that has failed need not wait for what it has left.
                in_order = (self.serving.done() or self._is_stopping) and self._wait_for_group(process.pid, stdout)
            if not in_order:
                kill_group(process.pid)
                # One that hangs in a driver ends when that lets it.
                wait_ended(members_of(process.pid), _KILLED_TIMEOUT_S)
        if not self.serving.done():
            self.serving.set_exception(self.failure())
        return not in_order

    def _wait_for_group(self, group: int, stdout: StdoutReader) -> bool:
        """Whether all its processes end in time."""
        while members := members_of(group):
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(members[0])
                try:
                    if not self._wait(fd, stdout):
                        return False
                finally:
                    os.close(fd)
        return True

    def _wait(self, ended: int, stdout: StdoutReader) -> bool:
        """Reads on until a process has ended (True) or the time is over. A pipe that nobody reads fills up, and vLLM
        logs to stdout when it is told to."""
        watched = select.poll()
        watched.register(ended, select.POLLIN)
        watched.register(self._wake, select.POLLIN)
        if stdout.is_open:
            watched.register(stdout.fd, select.POLLIN)
        while (left_s := self._deadline_s - time.monotonic()) > 0:
            ready = {fd for fd, _ in watched.poll(math.ceil(1000 * min(left_s, _LONGEST_WAIT_S)))}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if stdout.fd in ready and not stdout.read() and not stdout.is_open:
                watched.unregister(stdout.fd)
            if ended in ready:
                return True
        return False
