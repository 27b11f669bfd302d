"""A link that is reset once, in the middle of a push or a pull."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from tests.support.fault_proxy import Connection, FaultProxy, Way

_BYTES_PER_S = 20e6
"""Both ends read as fast as that: what one has not read when the link is reset would be lost, and sent again."""
_LOOK_EVERY_S = 0.05
_MAX_LOOKS = 200


class CutLink:
    """Listens at `address` while it is entered. A transfer of `whole_bytes` that goes this `way` is cut at `num_bytes`:
    its connection is reset, the others live on, and new ones are refused for `refuse_ms`. `meanwhile` is done then,
    after which nothing of it counts: all may be sent again. Of a push, `received` says how many bytes the daemon has: a
    busy one reads later, and what it has not read would be lost. So nothing passes before the reset until it has some,
    and no more come."""

    def __init__(
        self,
        target: str,
        way: Way,
        num_bytes: int,
        whole_bytes: int,
        *,
        refuse_ms: int = 0,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        received: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._proxy = FaultProxy(target, self._accepted)
        self._proxy.switch(way, bytes_per_s=_BYTES_PER_S)
        self._way = way
        self._num_bytes = num_bytes
        self._whole_bytes = whole_bytes
        self._refuse_ms = refuse_ms
        self._meanwhile = meanwhile
        self._received = received
        self._sent_bytes = 0
        self._outage: asyncio.Task[None] | None = None

    def differences(self) -> list[str]:
        """The link was cut, and then not everything was sent again, unless it may begin anew."""
        if self._outage is None:
            return ["the link was not cut: fewer bytes were sent"]
        if self._meanwhile is None and self._sent_bytes >= self._num_bytes + self._whole_bytes:
            told = f"{self._sent_bytes} bytes were sent for {self._whole_bytes}"
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
                self._proxy.switch(self._way, is_lost=True)
                self._outage = asyncio.create_task(self._cut(connection))

        connection.flows[self._way].on_arrival = sent

    async def _cut(self, connection: Connection) -> None:
        if self._received is not None:
            await _settled(self._received)
        if self._refuse_ms or self._meanwhile is not None:
            self._proxy.refuse()
        connection.reset()
        self._proxy.switch(self._way, is_lost=False)
        await self._pass_outage()

    async def _pass_outage(self) -> None:
        if self._meanwhile is not None:
            await self._meanwhile()
        if self._refuse_ms:
            await asyncio.sleep(self._refuse_ms / 1000)
        if self._refuse_ms or self._meanwhile is not None:
            await self._proxy.listen()


async def _settled(received: Callable[[], Awaitable[int]]) -> None:
    """Returns when there are bytes, and no more come, or after ten seconds: chunks may be larger than what has come."""
    before = 0
    for _ in range(_MAX_LOOKS):
        now = await received()
        if now == before > 0:
            return
        before = now
        await asyncio.sleep(_LOOK_EVERY_S)
