"""genserve's push: the bytes alone, checksums and all; they are applied when the time is taken."""

import time
from typing import Any

from genserve.client import AsyncClient


class GenservePush:
    """Of tensors in memory, on so many streams or, on the same host, by `shared_memory`."""

    def __init__(self, client: AsyncClient, tensors: Any, num_streams: int, *, shared_memory: bool = False) -> None:
        self._client = client
        self._tensors = tensors
        # Left to itself the client hands memory over wherever it can.
        self._options: dict[str, Any] = {"shared_memory": shared_memory, "streams": num_streams}

    async def move(self) -> float:
        """Stages, until the daemon says that it has them; then commits, as trainers do, whose next push takes the turn
        of the version before."""
        version = (await self._client.get_weights()).weight_version + 1
        began_at = time.monotonic()
        staged = await self._client.push_weights(self._tensors, version=version, action="stage", **self._options)
        elapsed_s = time.monotonic() - began_at
        await self._client.commit_push(staged.push.push_id)
        return elapsed_s

    async def stop(self) -> None:
        """Frees nothing: the client is the caller's."""


class GenserveUpdate:
    """The whole update, until the new version is served."""

    def __init__(self, client: AsyncClient, tensors: Any) -> None:
        self._client = client
        self._tensors = tensors

    async def move(self) -> float:
        """Pushes and applies."""
        version = (await self._client.get_weights()).weight_version + 1
        began_at = time.monotonic()
        await self._client.push_weights(self._tensors, version=version)
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Frees nothing: the client is the caller's."""
