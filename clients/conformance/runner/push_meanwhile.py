"""A push that arrives while a driver's request generates."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from clients.conformance.runner.relay import Change, Relay
from genserve.v1 import generation_pb2

_GENERATE = "/genserve.v1.GenerationService/Generate"


class PushMeanwhile:
    """Calls `push` once, when so many tokens of Generate have come, as long as it is entered."""

    def __init__(self, num_tokens: int, push: Callable[[], Awaitable[None]]) -> None:
        self._left = num_tokens
        self._push = push
        self._is_due = asyncio.Event()
        self._is_done = False

    def relay(self, target: str) -> Relay:
        """That counts them."""
        return Relay(target, Change(response=self._counted))

    def differences(self) -> list[str]:
        """What did not happen."""
        return [] if self._is_done else ["no weights were pushed while Generate ran"]

    async def __aenter__(self) -> Self:
        self._pushing = asyncio.create_task(self._push_when_due())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_due.is_set():
            self._pushing.cancel()
        await asyncio.gather(self._pushing, return_exceptions=True)

    def _counted(self, method: str, message: bytes) -> bytes:
        if method == _GENERATE:
            outputs = generation_pb2.GenerateResponse.FromString(message).outputs
            self._left -= sum(len(output.token_ids) for output in outputs)
            if self._left <= 0:
                self._is_due.set()
        return message

    async def _push_when_due(self) -> None:
        await self._is_due.wait()
        await self._push()
        self._is_done = True
