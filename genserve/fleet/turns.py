"""Locks for changes of the fleet on its replicas: one change at a time for each lease and each adapter."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary


class Turns:
    """Turns of leases, by their ids, or of adapters, by their names.

    All replicas are asked for a lease, or for an adapter, by one call at a time. Otherwise a replica that is yet to be
    told of the end of a lease would answer with the old one, which then ends; and one that has just unloaded an adapter
    would be told to load it, because others are still loading it for the call before.

    What is done on one replica after the other takes no turn, because one that hangs would keep the others waiting: the
    end of a lease, or the load of an adapter where it lacks. It holds off turns that are yet to begin. A call that was
    granting a lease while it was ended finds out at its end, and undoes what it did.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._holding_off: dict[str | None, set[asyncio.Future[None]]] = {}

    def of(self, name: str) -> asyncio.Lock:
        """The turn of a name, which is locked while a call has it, or is about to."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def take(self, name: str, timeout_s: float | None = None) -> asyncio.Lock:
        """The turn of a name, which the caller is to release. Raises TimeoutError."""
        turn = self.of(name)
        async with asyncio.timeout(timeout_s):
            await turn.acquire()
            try:
                while waits_for := [*self._holding_off.get(name, ()), *self._holding_off.get(None, ())]:
                    await asyncio.wait(waits_for)
            except BaseException:
                turn.release()
                raise
        return turn

    @asynccontextmanager
    async def taken(self, name: str) -> AsyncIterator[None]:
        """The block has the turn of a name."""
        turn = await self.take(name)
        try:
            yield
        finally:
            turn.release()

    @contextmanager
    def holding_off(self, name: str | None = None) -> Iterator[None]:
        """While the block runs, no turn of this name begins; None = of any name."""
        done = asyncio.get_running_loop().create_future()
        holding_off = self._holding_off.setdefault(name, set())
        holding_off.add(done)
        try:
            yield
        finally:
            done.set_result(None)
            holding_off.discard(done)
            if not holding_off:
                del self._holding_off[name]

    async def over(self) -> None:
        """Returns when all turns that have begun are released."""
        for turn in tuple(self._turns.values()):
            async with turn:
                pass
