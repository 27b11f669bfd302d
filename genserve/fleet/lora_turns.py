"""Whose turn it is to load or unload an adapter of the fleet."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary


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
