"""A link that is reset once, when so many bytes of a push have gone to the daemon."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from tests.support.fault_proxy import Connection, FaultProxy, Way

_BYTES_PER_S = 20e6
"""A daemon reads as fast as that: what it has not read when the link is reset would be lost, and sent again."""


class CutLink:
    """Listens at `address` while it is entered. A push of `push_bytes` is cut at `num_bytes`: its connection is reset,
    the others live on, and new ones are refused for `refuse_ms`. `forget` makes the daemon forget the push meanwhile,
    as one that is started again does."""

    def __init__(
        self,
        target: str,
        num_bytes: int,
        push_bytes: int,
        refuse_ms: int = 0,
        forget: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._proxy = FaultProxy(target, self._accepted)
        self._proxy.switch(Way.TO_SERVER, bytes_per_s=_BYTES_PER_S)
        self._num_bytes = num_bytes
        self._push_bytes = push_bytes
        self._refuse_ms = refuse_ms
        self._forget = forget
        self._sent_bytes = 0
        self._outage: asyncio.Task[None] | None = None

    def differences(self) -> list[str]:
        """The link was cut, and then not all of the push was sent again, unless the daemon had forgotten it."""
        if self._outage is None:
            return ["the link was not cut: fewer bytes were sent"]
        if self._forget is None and self._sent_bytes >= self._num_bytes + self._push_bytes:
            told = f"{self._sent_bytes} bytes were sent for a push of {self._push_bytes}"
            return [f"{told}: all of them again after the cut"]
        return []

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._proxy.address

    async def __aenter__(self) -> Self:
        await self._proxy.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outage is not None:
            await self._outage
        await self._proxy.__aexit__(exc_type, exc, traceback)

    def _accepted(self, connection: Connection) -> None:
        def sent(num_bytes: int) -> None:
            self._sent_bytes += num_bytes
            if self._sent_bytes >= self._num_bytes and self._outage is None:
                if self._refuse_ms:
                    self._proxy.refuse()
                connection.reset()
                self._outage = asyncio.create_task(self._pass_outage())

        connection.flows[Way.TO_SERVER].on_arrival = sent

    async def _pass_outage(self) -> None:
        if self._forget is not None:
            await self._forget()
        if self._refuse_ms:
            await asyncio.sleep(self._refuse_ms / 1000)
            await self._proxy.listen()
