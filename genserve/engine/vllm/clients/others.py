"""The requests of other processes, for the daemon's engine."""

import asyncio
from collections.abc import Sequence
from typing import Protocol


class OtherClients(Protocol):
    """Front ends, or the OpenAI server. Each wait has a deadline: a process that does not answer is ended, and its
    requests with it."""

    @property
    def num_requests(self) -> int:
        """Requests that are admitted and unfinished; where only sequences are known, these."""

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends requests (None = all) with reason ABORTED; the ids that ran."""

    async def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED. How many there are."""

    async def paused(self) -> None:
        """The engine has aborted them."""

    def interrupted(self) -> "asyncio.Future[int]":
        """Nothing is scheduled: each watches its sequences from now on. Tokens that these have computed."""

    async def longest_wait_s(self) -> float | None:
        """When each of the watched sequences has another output or has ended, at the latest after WAIT_PATIENCE_S: the
        longest time that one was without output, None if none was."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
