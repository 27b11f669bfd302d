"""What a process beside the daemon answers about its requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from genserve.errors import EngineDeadError
from genserve.frontends import settings as questions
from genserve.frontends.link import Handler, Message


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
    """`joined`: the client, None until it has joined."""

    def __init__(self, joined: Callable[[], Client | None]) -> None:
        self._joined = joined

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By question."""
        return {
            questions.ABORT: self._abort,
            questions.PAUSING: self._pausing,
            questions.PAUSED: self._paused,
            questions.INTERRUPTED: self._interrupted,
            questions.LONGEST_WAIT: self._longest_wait,
            questions.IDLE: self._idle,
        }

    @property
    def _client(self) -> Client:
        client = self._joined()
        if client is None:
            raise EngineDeadError("this process has not joined the engine yet")
        return client

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
            async with asyncio.timeout(questions.IDLE_PATIENCE_S):
                await self._client.wait_idle()
                return Message({"idle": True})
        return Message({"idle": False})
