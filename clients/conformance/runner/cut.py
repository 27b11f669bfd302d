"""A link that is reset once, when so many bytes of a push have gone to the daemon."""

from types import TracebackType
from typing import Self

from tests.support.fault_proxy import Connection, FaultProxy, Way

_BYTES_PER_S = 20e6
"""A daemon reads as fast as that: what it has not read when the link is reset would be lost, and sent again."""


class CutLink:
    """Listens at `address` while it is entered. A push of `push_bytes` is cut at `num_bytes`."""

    def __init__(self, target: str, num_bytes: int, push_bytes: int) -> None:
        self._proxy = FaultProxy(target, self._accepted)
        self._proxy.switch(Way.TO_SERVER, bytes_per_s=_BYTES_PER_S)
        self._num_bytes = num_bytes
        self._push_bytes = push_bytes
        self._sent_bytes = 0
        self._is_done = False

    def differences(self) -> list[str]:
        """The link was cut, and then not all of the push was sent again."""
        if not self._is_done:
            return ["the link was not cut: fewer bytes were sent"]
        if self._sent_bytes >= self._num_bytes + self._push_bytes:
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
        await self._proxy.__aexit__(exc_type, exc, traceback)

    def _accepted(self, connection: Connection) -> None:
        def sent(num_bytes: int) -> None:
            self._sent_bytes += num_bytes
            if self._sent_bytes >= self._num_bytes and not self._is_done:
                self._is_done = True
                connection.reset()

        connection.flows[Way.TO_SERVER].on_arrival = sent
