"""The process that front ends are forked from.

It is itself forked from the daemon before the daemon has threads, connections or an engine, and does nothing but fork.
So a front end begins with all code loaded: it takes a moment to start, not the time and the memory of loading torch and
vLLM once more.
"""

import asyncio
import itertools
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from genserve.frontends.questions import FrontendSettings
from genserve.memory.allocator import freeze_objects
from genserve.process.signals import ending

ANSWER_TIMEOUT_S = 30.0
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 16
_EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Started:
    """A process, and a descriptor of it that becomes readable when it ends. The caller closes this."""

    pid: int
    pidfd: int


class Template:
    """The daemon's end. `pid` is that of the template."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        self._end = end
        self._end.setblocking(False)
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()
        self.pid = pid

    async def start(self, settings: FrontendSettings) -> Started:
        """Starts a front end, which inherits the descriptors of its settings. Raises OSError if this is not
        possible."""
        answer, fds = await self._ask(settings.to_json(), settings.fds)
        if not fds:
            raise OSError(answer["error"])
        return Started(answer["pid"], fds[0])

    async def how_ended(self, pid: int) -> str:
        """How a front end has ended, for people, if the template still knows."""
        try:
            answer, _ = await self._ask(str(pid), ())
        except OSError:
            return "has ended"
        return "has ended" if answer["status"] is None else ending(answer["status"])

    async def _ask(self, question: str, fds: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        """The answer, and the descriptor in it. Raises OSError if there is none."""
        async with self._turn:
            number = next(self._numbers)
            try:
                socket.send_fds(self._end, [f"{number} {question}".encode()], fds)
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await self._answer_to(number)
            except (TimeoutError, OSError) as error:
                raise OSError(f"the process that starts front ends does not answer: {error}") from error

    async def _answer_to(self, number: int) -> tuple[dict[str, Any], list[int]]:
        """Answers to starts that were given up come before it: what was started then ends by itself, because nobody has
        the other end of its link."""
        while True:
            await self._readable()
            data, fds, _, _ = socket.recv_fds(self._end, _MAX_MESSAGE_BYTES, 1)
            if not data:
                raise OSError("it has ended")
            answer = json.loads(data)
            if answer["number"] == number:
                return answer, fds
            for fd in fds:
                os.close(fd)

    async def _readable(self) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._end.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._end.fileno())

    def close(self) -> None:
        """Ends the template. Front ends that run go on."""
        self._end.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def fork_template(run: Callable[[FrontendSettings], int]) -> Template:
    """Forks the template. Call while this process has one thread. `run` is what a front end does; it returns the exit
    status."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    daemon_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _exit_after(lambda: serve_template(theirs, run, daemon_pid))
    theirs.close()
    return Template(ours, pid)


def serve_template(end: socket.socket, run: Callable[[FrontendSettings], int], daemon_pid: int) -> int:
    """Forks front ends as asked, and says how they have ended, until the daemon ends. Then ends those that are left:
    they watch the daemon themselves, but one that stands still cannot."""
    # Signals to the whole group, or the whole service, are for the daemon, which ends front ends after draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    freeze_objects()
    # Other children of the daemon have its end of the socket too: that it is closed does not say that the daemon lives.
    daemon = os.pidfd_open(daemon_pid)
    ready = select.poll()
    ready.register(end, select.POLLIN)
    ready.register(daemon, select.POLLIN)
    started: dict[int, int] = {}  # those that run, by their descriptors
    statuses: dict[int, int] = {}  # of those that have ended
    while daemon not in (now := {fd for fd, _ in ready.poll()}):
        for pidfd in now & started.keys():
            pid = started.pop(pidfd)
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ready.unregister(pidfd)
            os.close(pidfd)
        if end.fileno() not in now:
            continue
        data, fds, _, _ = socket.recv_fds(end, _MAX_MESSAGE_BYTES, _MAX_FDS)
        if not data:
            ready.unregister(end)  # the daemon ends
            continue
        number, _, text = data.decode().partition(" ")
        if text.isdecimal():
            end.send(json.dumps({"number": int(number), "status": statuses.pop(int(text), None)}).encode())
            continue
        try:
            settings = FrontendSettings.from_json(text).with_fds(fds)
            pid = os.fork()
            if pid == 0:
                end.close()
                for fd in (daemon, *started):
                    os.close(fd)
                random.seed()
                _exit_after(lambda: run(settings))  # noqa: B023  # the loop does not go on in this process
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            end.send(json.dumps({"number": int(number), "error": str(error)}).encode())
        else:
            socket.send_fds(end, [json.dumps({"number": int(number), "pid": pid}).encode()], [pidfd])
            started[pidfd] = pid
            ready.register(pidfd, select.POLLIN)
        finally:
            for fd in fds:
                os.close(fd)
    for pidfd in started:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return 0


def _exit_after(run: Callable[[], int]) -> None:
    """Ends this process, whose other callers belong to the one that it was forked from."""
    status = _EXIT_FAILED
    try:
        status = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
