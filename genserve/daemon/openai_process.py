"""The process of vLLM's OpenAI server: what it does, and how the daemon starts it.

The composition root of this process, as `frontend` is of a front end. It joins the engine as a client, serves HTTP on
the daemon's listener, and ends with the daemon. Nothing of vLLM is imported before its environment is as it must be.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

import uvloop

from genserve.engine.vllm.openai.environment import begin
from genserve.errors import UnavailableError
from genserve.frontends import questions
from genserve.frontends.link import Link, Message
from genserve.frontends.questions import Answers, FrontendSettings
from genserve.frontends.template import Started
from genserve.process.signals import ending

if TYPE_CHECKING:
    from genserve.engine.vllm.openai.app import HttpServer
    from genserve.engine.vllm.openai.engine import OpenAIEngine


@dataclass(frozen=True, slots=True)
class Inherited:
    """A descriptor that a process of multiprocessing inherits."""

    fd: int

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(descriptor: Any) -> Inherited:
    return Inherited(descriptor.detach())


@dataclass(frozen=True, slots=True)
class Job:
    """The argument of a process. `listener`: of HTTP; `link` and `seat`: to the daemon and the engine; `flags`: as
    `vllm serve` would have parsed them, pickled; `max_n`: the largest n of a request."""

    daemon_pid: int
    listener: socket.socket
    link: Inherited
    seat: Sequence[Inherited]
    flags: bytes
    max_n: int


class Launch:
    """Starts processes that serve on `listener`, one at a time. `flags` and `max_n` as in Job."""

    def __init__(self, flags: bytes, max_n: int, listener: socket.socket) -> None:
        self._flags = flags
        self._max_n = max_n
        self._listener = listener
        self._process: Any = None  # of multiprocessing

    async def start(self, settings: FrontendSettings) -> Started:
        """Starts one. Call it in the main thread. Raises OSError if this is not possible."""
        link, seat = Inherited(settings.link_fd), tuple(map(Inherited, settings.seat_fds))
        job = Job(settings.daemon_pid, self._listener, link, seat, self._flags, self._max_n)
        # Python's own way to start another interpreter hands descriptors over, and tests can start it faster.
        spawn = multiprocessing.get_context("spawn")
        process: Any = spawn.Process(target=run, args=(job,), name="OpenAI server", daemon=True)
        process.start()
        self._process = process
        try:
            return Started(process.pid, os.pidfd_open(process.pid))
        except OSError:
            process.kill()
            process.join()
            raise

    async def how_ended(self, pid: int) -> str:
        """How the last one ended, for people. Call when it has."""
        self._process.join()
        return ending(self._process.exitcode)


def run(job: Job) -> None:
    """Serves until SIGTERM; then until the requests that run have been answered."""
    begin(job.daemon_pid, job.max_n)
    uvloop.run(_serve(job))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end would run finalizers of vLLM's whose modules are gone by then


async def _serve(job: Job) -> None:
    server = _Server(job)
    await server.link.open()
    try:
        await server.link.run()
        await server.ended()
    finally:
        server.close()


class _Server:
    """The engine, the HTTP server and the link of this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine: OpenAIEngine | None = None
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._answers = Answers()
        self.link = Link(
            socket.socket(fileno=job.link.fd),
            {
                questions.JOIN: self._join,
                questions.SERVE: self._serve,
                questions.CHANGED: self._changed,
                **self._answers.handlers,
                questions.STOP: self._stop,
            },
        )

    async def _join(self, message: Message) -> Message:
        from genserve.engine.vllm.openai.app import http_server
        from genserve.engine.vllm.openai.engine import OpenAIEngine

        self._engine = self._answers.joined = await OpenAIEngine.join(
            message.data, [each.fd for each in self._job.seat]
        )
        self._http = await http_server(self._engine, self._job.flags)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._http.finish)
        return Message({"port": self._job.listener.getsockname()[1]})

    async def _serve(self, message: Message) -> Message:
        if self._http is None:
            raise UnavailableError("this process has not joined the engine yet")
        self._serving = asyncio.create_task(self._http.run_on(self._job.listener), name="HTTP")
        self._serving.add_done_callback(lambda _: self.link.close())
        up = asyncio.create_task(self._http.is_up.wait())
        await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        return Message()

    async def _changed(self, message: Message) -> Message:
        """Says that this process is alive."""
        return Message()

    async def _stop(self, message: Message) -> Message:
        if self._http is not None:
            self._http.finish()
        return Message()

    async def ended(self) -> None:
        """Raises the error of the HTTP server, if it has failed."""
        if self._serving is not None and self._serving.done():
            await self._serving

    def close(self) -> None:
        """Leaves the engine."""
        if self._engine is not None:
            self._engine.close()
