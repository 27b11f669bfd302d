"""The answer of one call to a fleet, on its way to the program that has made the call."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genserve.client.direct.pipe import Pipe
from genserve.forward.caller import Failure

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall


class Answer:
    """What a replica says, as bytes, and the failures that no replica tells. It is the Caller of who forwards it."""

    def __init__(self, timeout_s: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self.ends_at_s = None if timeout_s is None else self._clock() + timeout_s
        self.messages: Pipe[bytes | Failure] = Pipe()

    def remaining_s(self) -> float | None:
        """The time until the deadline, None = there is none."""
        return None if self.ends_at_s is None else max(0.0, self.ends_at_s - self._clock())

    async def admitted(self) -> None:
        """Nobody waits for this."""

    async def write(self, data: bytes) -> None:
        """Passes on a message."""
        await self.messages.write(data)

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Tells of requests that have failed."""
        for failure in failures:
            await self.messages.write(failure)

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """The error that is raised next says all that this client knows of it."""
