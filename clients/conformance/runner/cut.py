"""A link that is reset once, when so many bytes have gone to the daemon."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from tests.support.fault_proxy import FaultProxy, Way

_BYTES_PER_S = 20e6
"""Slow enough to be looked at while a push of some megabytes is under way."""
_LOOK_S = 0.002


class CutLink:
    """Listens at `address` while it is entered; `is_done` once it was reset."""

    def __init__(self, target: str, num_bytes: int) -> None:
        self._proxy = FaultProxy(target)
        self._proxy.switch(Way.TO_SERVER, bytes_per_s=_BYTES_PER_S)
        self._num_bytes = num_bytes
        self._stack = AsyncExitStack()
        self.is_done = False

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._proxy.address

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._proxy)
        watching = asyncio.create_task(self._watch())
        self._stack.callback(watching.cancel)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _watch(self) -> None:
        while not self.is_done:
            await asyncio.sleep(_LOOK_S)
            for connection in self._proxy.connections:
                if connection.flows[Way.TO_SERVER].num_bytes >= self._num_bytes:
                    self.is_done = True
                    connection.reset()
