"""Whose turn it is to change a lease or an adapter of the fleet on the replicas."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from genserve.errors import DeadlineError


class LeaseTurns:
    """A lease is granted by one call at a time, and by none while the lease is being ended. Otherwise a replica that is
    yet to be told of the end would answer with the old lease, which then ends.

    A call that ends a lease waits for no other, because one replica that hangs would keep the others paused. A call
    that was granting the lease finds out at its end, and undoes what it did.
    """

    def __init__(self) -> None:
        self._granting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ending: dict[str | None, set[asyncio.Future[None]]] = {}

    async def take(self, lease_id: str, timeout_s: float) -> asyncio.Lock:
        """The turn to grant a lease, which the caller is to release. Raises DeadlineError."""
        turn = self._granting.setdefault(lease_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s):
                await turn.acquire()
                try:
                    while ending := [*self._ending.get(lease_id, ()), *self._ending.get(None, ())]:
                        await asyncio.wait(ending)
                except BaseException:
                    turn.release()
                    raise
        except TimeoutError:
            raise DeadlineError(f"other pauses and resumes took {timeout_s:g} s") from None
        return turn

    async def over(self) -> None:
        """Returns when all turns that were taken before have been released."""
        for turn in tuple(self._granting.values()):
            async with turn:
                pass

    @contextmanager
    def ending(self, lease_id: str | None = None) -> Iterator[None]:
        """While replicas are told to end a lease, no call can take the turn to grant it. None = all leases."""
        ended = asyncio.get_running_loop().create_future()
        ending = self._ending.setdefault(lease_id, set())
        ending.add(ended)
        try:
            yield
        finally:
            ended.set_result(None)
            ending.discard(ended)
            if not ending:
                del self._ending[lease_id]


class LoraTurns:
    """An adapter is loaded or unloaded by one call at a time: a replica that has just unloaded it would be told to load
    it, because others are still loading it for the call before.

    Replicas that lack it are told to load it side by side, because one that hangs would keep it from the others, and
    while it is no call's turn.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._catching_up: dict[str, set[asyncio.Future[None]]] = {}

    def of(self, lora_name: str) -> asyncio.Lock:
        """The turn of an adapter, which is locked while a call has it, or is about to."""
        return self._turns.setdefault(lora_name, asyncio.Lock())

    async def take(self, lora_name: str) -> asyncio.Lock:
        """The turn for a call, which is to release it."""
        turn = self.of(lora_name)
        await turn.acquire()
        try:
            while catching_up := self._catching_up.get(lora_name):
                await asyncio.wait(catching_up)
        except BaseException:
            turn.release()
            raise
        return turn

    @asynccontextmanager
    async def taken(self, lora_name: str) -> AsyncIterator[None]:
        """The block is a call that has the turn."""
        turn = await self.take(lora_name)
        try:
            yield
        finally:
            turn.release()

    @contextmanager
    def catching_up(self, lora_name: str) -> Iterator[None]:
        """While one replica that lacks it loads it; to be begun while it is no call's turn. Calls wait for the end."""
        done = asyncio.get_running_loop().create_future()
        catching_up = self._catching_up.setdefault(lora_name, set())
        catching_up.add(done)
        try:
            yield
        finally:
            done.set_result(None)
            catching_up.discard(done)
            if not catching_up:
                del self._catching_up[lora_name]
