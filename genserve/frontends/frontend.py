"""One front end, as the daemon sees it: a process, the link to it, and its place at the engine."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from genserve.engine.types import UsedAdapter
from genserve.errors import DeadlineError, GenserveError, MessageTooLargeError, QueueFullError, UnavailableError
from genserve.frontends import questions
from genserve.frontends.link import Link, Message
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.template import Started
from genserve.observe.notices import say
from genserve.process.supervisor import Supervised

_START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


class Seat(Protocol):
    """A place at the engine."""

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors that the process inherits."""

    @property
    def invitation(self) -> bytes:
        """The data that the process needs to join."""

    @property
    def num_requests(self) -> int:
        """Requests of the process that are admitted and unfinished."""

    async def use_adapter(self, name: str, request_id: str) -> UsedAdapter:
        """The adapter of one of its requests, until `release_adapter`. Raises LoraNotFoundError."""

    def release_adapter(self, request_id: str) -> None:
        """Records that the request has ended."""

    def vacate(self) -> list[str]:
        """Records that the process has died. Returns what it left in the engine, for `abort`."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Ends what it left in the engine."""

    def close(self) -> None:
        """Frees its memory."""


class Starter(Protocol):
    """Starts processes."""

    async def start(self, settings: FrontendSettings) -> Started:
        """Starts one, which inherits the descriptors of its settings. Raises OSError if this is not possible."""

    async def how_ended(self, pid: int) -> str:
        """How one has ended that it has started, for people."""


Abort = Callable[[Sequence[str] | None], Awaitable[bytes]]
"""Ends requests of any client, None = all; the answer as a message of the wire."""


class FrontEnd(Supervised):
    """A process at one seat, or none. `what` it is, for people. Without `abort` it asks the daemon nothing."""

    def __init__(
        self,
        starter: Starter,
        seat: Seat,
        settings: FrontendSettings,
        abort: Abort | None,
        *,
        what: str = "front end",
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        self._starter = starter
        self._what = what
        self._start_timeout_s = start_timeout_s
        self._seat = seat
        self._settings = settings
        self._abort = abort
        self._process: Started | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._link: Link | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_joined = False
        self._aborting: set[asyncio.Task[None]] = set()

    def __str__(self) -> str:
        return f"{self._what} on port {self.port}" if self.port else self._what

    @property
    def port(self) -> int:
        """Where it serves, also the next process at this seat; 0 before the first one."""
        return self._settings.port

    @property
    def pid(self) -> int:
        """The id of the process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def num_requests(self) -> int:
        """Requests that are admitted and unfinished."""
        return self._seat.num_requests

    async def start(self) -> None:
        """Starts a process, and returns when it serves. Raises OSError or RuntimeError if it does not."""
        ours, theirs = socket.socketpair()
        settings = replace(self._settings, link_fd=theirs.fileno(), seat_fds=tuple(self._seat.fds))
        try:
            self._process = await self._starter.start(settings)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._ended.clear()
        asyncio.get_running_loop().add_reader(self._process.pidfd, self._note_end, self._process.pidfd)
        self._link = Link(ours, self._handlers())
        try:
            await self._link.open()
            self._reading = asyncio.create_task(self._link.run(), name="link to a front end")
            joined = await self._link.ask(
                questions.JOIN, Message(data=self._seat.invitation), timeout_s=self._start_timeout_s
            )
            self._settings = replace(self._settings, port=joined.values["port"])
            # Before it admits requests: a pause or an abort must not miss one.
            self._is_joined = True
            await self._link.ask(questions.SERVE, timeout_s=self._start_timeout_s)
        except (GenserveError, OSError) as error:
            self.kill()
            raise RuntimeError(f"it did not start: {error} ({await self.ended()})") from error
        except BaseException:
            self.kill()
            raise

    async def process_ended(self) -> None:
        """Returns when no process runs."""
        await self._ended.wait()

    async def ended(self) -> str:
        """As `process_ended`, and takes its place back: what it left in the engine is being ended then. How it has
        ended, for people. For one caller at a time."""
        await self._ended.wait()
        pid = self.pid
        await self._clean_up()
        return f"it {await self._starter.how_ended(pid)}"

    def kill(self) -> None:
        """Ends the process at once."""
        self._is_joined = False
        self._signal(signal.SIGKILL)

    def finish(self) -> None:
        """Has the process end when it has answered the requests that it has, if it is one that can."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process.pidfd, number)

    async def ask(
        self, question: str, timeout_s: float = ANSWER_TIMEOUT_S, *, for_client: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any] | None:
        """The answer; None if no process is there, or it has ended. One that does not answer in time is killed. What a
        client asks for may be too large or too much, which is nobody else's fault: MessageTooLargeError and
        QueueFullError."""
        if self._link is None or not self._is_joined:
            return None
        try:
            if for_client is None:
                return (await self._link.ask(question, timeout_s=timeout_s)).values
            return (await self._link.ask_for_client(question, Message(for_client), timeout_s=timeout_s)).values
        except UnavailableError:
            return None
        except (MessageTooLargeError, QueueFullError):
            raise
        except DeadlineError:
            say(f"{self}: it does not answer, and is killed")
        except GenserveError as error:
            say(f"{self}: it failed, and is killed: {error.message}")
        self.kill()
        return None

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        if self._process is not None:
            await self.ask(questions.STOP, timeout_s=_STOP_TIMEOUT_S)
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                self.kill()
            await self._ended.wait()
            await self._clean_up()
        for task in self._aborting:
            task.cancel()
        await asyncio.gather(*self._aborting, return_exceptions=True)
        self._seat.close()

    def _note_end(self, pidfd: int) -> None:
        # It stays readable: the loop would call this again and again until somebody waits for the end.
        asyncio.get_running_loop().remove_reader(pidfd)
        self._ended.set()

    async def _clean_up(self) -> None:
        if self._process is not None:
            os.close(self._process.pidfd)
            self._process = None
        self._is_joined = False
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        left = self._seat.vacate()
        if left:
            aborting = asyncio.create_task(self._end_left(left), name="end of a front end's requests")
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    async def _end_left(self, left: Sequence[str]) -> None:
        try:
            await self._seat.abort(left)
        except GenserveError as error:
            say(f"{self}: the requests that it has left may still run: {error.message}")

    def _handlers(self) -> Mapping[str, Callable[[Message], Awaitable[Message]]]:
        if self._abort is None:
            return {}
        return {
            questions.ABORT: partial(_abort_everywhere, self._abort),
            questions.USE_ADAPTER: self._use_adapter,
            questions.RELEASE_ADAPTER: self._release_adapter,
        }

    async def _use_adapter(self, message: Message) -> Message:
        used = await self._seat.use_adapter(message.values["name"], message.values["request_id"])
        return Message(asdict(used))

    async def _release_adapter(self, message: Message) -> Message:
        self._seat.release_adapter(message.values["request_id"])
        return Message()


async def _abort_everywhere(abort: Abort, message: Message) -> Message:
    return Message(data=await abort(message.values["request_ids"]))
