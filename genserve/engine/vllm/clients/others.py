"""The requests of other processes, for the daemon's engine."""

from collections.abc import Sequence
from typing import Protocol


class OtherClients(Protocol):
    """Front ends. Each wait has a deadline: a process that does not answer is ended, and its requests with it."""

    @property
    def num_requests(self) -> int:
        """Requests that are admitted and unfinished; where only sequences are known, these."""

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends requests (None = all) with reason ABORTED; the ids that ran."""

    async def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED. How many there are."""

    async def paused(self) -> None:
        """The engine has aborted them."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""


class NoOthers:
    """The daemon is alone."""

    num_requests = 0

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """None runs."""
        return []

    async def pausing(self) -> int:
        """There are none."""
        return 0

    async def paused(self) -> None:
        """There were none."""

    async def wait_idle(self) -> None:
        """None is left."""
