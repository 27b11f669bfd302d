"""News for everyone who waits, which are told again and again."""

import asyncio


class Change:
    """Something that changes. Nobody who waits misses the next change, and none is kept for who comes later."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """It has changed: everyone who waits goes on."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Returns when it has changed after the call."""
        await self._next.wait()
