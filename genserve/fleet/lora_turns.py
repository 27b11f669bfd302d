"""Whose turn it is to load or unload an adapter of the fleet."""

import asyncio
from weakref import WeakValueDictionary


class LoraTurns:
    """An adapter is loaded or unloaded by one call at a time: a replica that has just unloaded it would be told to load
    it, because others are still loading it for the call before."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, lora_name: str) -> asyncio.Lock:
        """The turn of an adapter: to be held meanwhile."""
        return self._turns.setdefault(lora_name, asyncio.Lock())
