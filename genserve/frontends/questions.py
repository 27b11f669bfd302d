"""How the daemon starts a front end, the questions that they ask each other, and the answers of a process beside the
daemon about its requests."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from genserve.errors import EngineDeadError
from genserve.frontends.link import Handler, Message

# The daemon asks a front end.
JOIN = "join"
"""Join the engine that the invitation is for, and take a port. Answer: the port."""
SERVE = "serve"
"""Admit requests. The daemon counts on the front end then, in a pause, an abort and a shutdown."""
CHANGED = "changed"
"""The state has changed: read the words. Answer: nothing, which says that the front end is alive."""
ABORT = "abort"
"""End these requests. Answer: those that ran. A front end asks the daemon the same, about all clients; the answer then
is an AbortResponse."""
PAUSING = "pausing"
"""Requests that the engine aborts from now on end as PAUSED. Answer: how many there are."""
PAUSED = "paused"
"""The engine has aborted them."""
INTERRUPTED = "interrupted"
"""Nothing is scheduled: watch the sequences that have had output. Answer: the tokens that these have computed."""
LONGEST_WAIT = "longest wait"
"""Answer, when each of them has another output or has ended, or after WAIT_PATIENCE_S: the longest time that one was
without output, or null."""
IDLE = "idle"
"""Answer, after a while at most: whether no request is left."""
STOP = "stop"
"""Let calls end within the grace period, and end."""

# A front end asks the daemon.
USE_ADAPTER = "use adapter"
RELEASE_ADAPTER = "release adapter"

IDLE_PATIENCE_S = 2.0
"""After this time IDLE is answered with no."""


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """The settings that a front end starts with. `link_fd`, `state_fd` and those of its `seat` are descriptors that it
    inherits; an OpenAI server has no state (-1). `port` 0 picks one. `metrics_directory`: where it counts what the
    daemon shows, under its `name`; "" = nowhere."""

    daemon_pid: int
    link_fd: int
    state_fd: int
    seat_fds: tuple[int, ...]
    port: int
    metrics_directory: str = ""
    name: str = ""

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        return self.link_fd, self.state_fd, *self.seat_fds

    def with_fds(self, fds: Sequence[int]) -> Self:
        """The settings with the numbers that the descriptors have in another process. Raises ValueError unless there
        are as many."""
        if len(fds) != len(self.fds):
            raise ValueError(f"{len(fds)} descriptors came, of {len(self.fds)}")
        return replace(self, link_fd=fds[0], state_fd=fds[1], seat_fds=tuple(fds[2:]))

    def to_json(self) -> str:
        """The settings for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings in another process."""
        fields = json.loads(text)
        return cls(**{**fields, "seat_fds": tuple(fields["seat_fds"])})


def ids_to_values(request_ids: Any) -> Mapping[str, Any]:
    """The values of ABORT; None = all."""
    return {"request_ids": None if request_ids is None else list(request_ids)}


class Client(Protocol):
    """A client of the daemon's engine."""

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests (None = all); the ids that ran, and those that did not."""

    def pausing(self) -> int:
        """The engine aborts all requests from now on. How many there are."""

    def paused(self) -> None:
        """The engine has aborted them."""

    def interrupted(self) -> int:
        """Nothing is scheduled: watches the sequences from now on. Tokens that these have computed."""

    async def longest_wait_s(self) -> float | None:
        """The longest time that one of them was without output, when all have output again or have ended; None if none
        was."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""


class Answers:
    """The answers of a process beside the daemon about its requests."""

    def __init__(self) -> None:
        self.joined: Client | None = None
        """The client, once it has joined the engine."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By question."""
        return {
            ABORT: self._abort,
            PAUSING: self._pausing,
            PAUSED: self._paused,
            INTERRUPTED: self._interrupted,
            LONGEST_WAIT: self._longest_wait,
            IDLE: self._idle,
        }

    @property
    def _client(self) -> Client:
        if self.joined is None:
            raise EngineDeadError("this process has not joined the engine yet")
        return self.joined

    async def _abort(self, message: Message) -> Message:
        aborted_ids, _ = await self._client.abort(message.values["request_ids"])
        return Message({"aborted_ids": aborted_ids})

    async def _pausing(self, message: Message) -> Message:
        return Message({"num_requests": self._client.pausing()})

    async def _paused(self, message: Message) -> Message:
        self._client.paused()
        return Message()

    async def _interrupted(self, message: Message) -> Message:
        return Message({"num_computed_tokens": self._client.interrupted()})

    async def _longest_wait(self, message: Message) -> Message:
        return Message({"longest_wait_s": await self._client.longest_wait_s()})

    async def _idle(self, message: Message) -> Message:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_PATIENCE_S):
                await self._client.wait_idle()
                return Message({"idle": True})
        return Message({"idle": False})
