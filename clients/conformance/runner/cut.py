"""A link that is reset once, when so many bytes of a push have gone to the daemon."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from tests.support.fault_proxy import FaultProxy, Flow, Way

_BYTES_PER_S = 20e6
"""Slow enough to be looked at while a push of some megabytes is under way."""
_LOOK_S = 0.002


class CutLink:
    """Listens at `address` while it is entered. A push of `push_bytes` is cut at `num_bytes`."""

    def __init__(self, target: str, num_bytes: int, push_bytes: int) -> None:
        self._proxy = FaultProxy(target)
        self._proxy.switch(Way.TO_SERVER, bytes_per_s=_BYTES_PER_S)
        self._num_bytes = num_bytes
        self._push_bytes = push_bytes
        self._stack = AsyncExitStack()
        self._is_done = False
        self._flows: set[Flow] = set()

    def differences(self) -> list[str]:
        """The link was cut, and then not all of the push was sent again."""
        sent_bytes = sum(flow.num_bytes for flow in self._flows)
        if not self._is_done:
            return ["the link was not cut: fewer bytes were sent"]
        if sent_bytes >= self._num_bytes + self._push_bytes:
            return [f"{sent_bytes} bytes were sent for a push of {self._push_bytes}: all of them again after the cut"]
        return []

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
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in self._proxy.connections:
                flow = connection.flows[Way.TO_SERVER]
                self._flows.add(flow)
                if flow.num_bytes >= self._num_bytes and not self._is_done:
                    self._is_done = True
                    connection.reset()
