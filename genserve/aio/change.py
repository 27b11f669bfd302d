"""An event that happens again and again, for any number of tasks that wait for it."""

import asyncio


class Change:
    """Wakes every task that waits when `tell` is called. A task that waits later waits for the next call."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Wakes every task that waits now."""
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next `tell`: for who looks at something first, and then waits for a change since."""
        return self._next

    async def wait(self) -> None:
        """Returns at the next `tell`."""
        await self._next.wait()
