"""The LoRA adapters that requests use: those of the daemon, or of a daemon that a front end asks."""

from typing import Protocol

from genserve.engine.types import UsedAdapter


class Adapters(Protocol):
    """Keeps an adapter loaded for as long as a request uses it."""

    async def use(self, name: str, request_id: str, /) -> UsedAdapter:
        """The adapter of a request, until `release`. Raises LoraNotFoundError."""

    def release(self, request_id: str, /) -> None:
        """Records that the request has ended, or was not admitted. Does nothing for one without an adapter."""
