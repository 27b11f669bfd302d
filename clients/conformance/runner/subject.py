"""The open daemon as the runner sees it: brings it to checkpoint a, and looks at it after a scenario."""

import asyncio
from collections.abc import Iterator
from typing import Any

from genserve.client import AsyncClient
from genserve.errors import PushNotFoundError

_IDLE_TIMEOUT_S = 30.0


class Subject:
    """One daemon, with the digests that live weights have after the daemon itself has read a checkpoint."""

    def __init__(self, client: AsyncClient, checkpoints: dict[str, str]) -> None:
        self._client = client
        self._checkpoints = checkpoints
        self._digests: dict[str, dict[str, str]] = {}
        self._at = ""

    async def restore(self) -> int:
        """The served version, after checkpoint a was loaded if need be."""
        if not self._digests:
            self._digests = {name: await self._loaded(name) for name in ("b", "a")}
        elif self._at != "a":
            await self._loaded("a")
        self._at = "a"
        return (await self._client.get_weights()).weight_version

    async def load(self, name: str, above: int = 1) -> None:
        """Serves a checkpoint as the version that is so much higher than the served one."""
        version = (await self._client.get_weights()).weight_version + above
        await self._client.load_weights(self._checkpoints[name], version=version, force=above == 0)

    async def discard(self, push_id: str) -> None:
        """Makes the daemon forget a push, also one that is being sent."""
        await self._client.discard_push(push_id, force=True)

    async def received_bytes(self, push_id: str) -> int:
        """How much of a push the daemon has."""
        try:
            return (await self._client.get_push(push_id)).push.received_bytes
        except PushNotFoundError:
            return 0

    async def _loaded(self, name: str) -> dict[str, str]:
        await self.load(name)
        return await self._live()

    async def _live(self) -> dict[str, str]:
        served = await self._client.get_weights(include_digests=True)
        return {f"{rank} {name}": sha256 for (rank, name), sha256 in served.digests.items()}

    async def differences(self, after: dict[str, Any]) -> list[str]:
        """What is not as a scenario leaves it: nothing runs, nothing is paused, and the weights are whole.

        Ends requests and pauses, or the next driver would have to wait for them.
        """
        self._at = ""
        found: list[str] = []
        status = await self._client.status()
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                async for status in self._client.watch_status(interval_s=0.1):
                    if not status.load.running and not status.load.waiting:
                        break
        except TimeoutError:
            found.append(f"afterwards {status.load.running} requests run and {status.load.waiting} wait")
            await self._client.abort(all=True)
        found += [f"afterwards {lease.holder!r} holds a pause" for lease in status.state.pauses]
        if status.state.pauses:
            await self._client.resume(force=True)
        live = await self._live()
        self._at = next((name for name, digests in self._digests.items() if digests == live), "")
        if after:
            if status.state.weight_version != after["version"]:
                found.append(f"afterwards version {status.state.weight_version}, expected {after['version']}")
            found += _wrong(live, self._digests[after["weights"]], after["weights"])
        return found


def _wrong(live: dict[str, str], expected: dict[str, str], name: str) -> Iterator[str]:
    wrong = sorted(tensor for tensor in live.keys() | expected.keys() if live.get(tensor) != expected.get(tensor))
    if wrong:
        yield f"afterwards {len(wrong)} of {len(expected)} live tensors are not those of {name}, such as {wrong[0]}"
