"""Replicas that are found, now and later: behind a name of DNS, such as a headless service of Kubernetes, or wherever
else somebody looks for them."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from typing import TypeAlias

from genserve.addresses import joined
from genserve.errors import GenserveError, ReplicaNotFoundError
from genserve.fleet.router import Router
from genserve.routing.replica import ReplicaState

log = logging.getLogger(__name__)

INTERVAL_S = 5.0

FoundAddresses: TypeAlias = AsyncGenerator[Collection[str], None]
"""All addresses at each look. It looks every INTERVAL_S or so, also when nothing has changed."""


class Discovery:
    """Keeps the replicas of a router those that are found. One whose address is gone is removed when it does not answer
    any more either: a daemon that ends leaves DNS before it has finished its requests, and a name server that fails
    must not empty the fleet."""

    def __init__(self, router: Router, name: str, found: FoundAddresses) -> None:
        """`name`: where it looks, for people."""
        self._router = router
        self._name = name
        self._found = found
        self._mine: set[str] = set()
        self._failure = ""

    async def run(self) -> None:
        """Takes what is found, until it is cancelled."""
        async with aclosing(self._found) as found:  # a generator that is left would look on
            async for addresses in found:
                try:
                    await self._take(set(addresses))
                    self._failure = ""
                except GenserveError as error:
                    if str(error) != self._failure:
                        self._failure = str(error)
                        log.warning("%s: %s", self._name, error)

    async def _take(self, addresses: set[str]) -> None:
        for address in self._mine - addresses:  # first, because they take the room of new ones
            upstream = self._router.fleet.upstreams.get(address)
            if upstream is None:
                self._mine.discard(address)
            elif self._router.fleet.where(upstream.member)[0] in (ReplicaState.UNHEALTHY, ReplicaState.CONNECTING):
                with suppress(ReplicaNotFoundError):  # somebody else removes it
                    await self._router.remove(address)
                self._mine.discard(address)
        for address in sorted(addresses - self._mine):
            self._router.add(address)
            self._mine.add(address)


def split_name(name: str) -> tuple[str, int]:
    """The host and port of NAME:PORT. Raises ValueError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"must be NAME:PORT, is {name!r}")
    return host, int(port)


async def dns_addresses(name: str, interval_s: float = INTERVAL_S) -> AsyncGenerator[Collection[str], None]:
    """What NAME:PORT resolves to, again and again. A failure is logged once. Raises ValueError for another name."""
    host, port = split_name(name)
    said = ""
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty label
            if str(error) != said:
                said = str(error)
                log.warning("%s: %s", host, error)
        else:
            said = ""
            yield {joined(str(address[0]), port) for *_, address in found}
        await asyncio.sleep(interval_s)
