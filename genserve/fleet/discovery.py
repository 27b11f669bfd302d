"""Replicas that are found, now and later: behind a name of DNS, such as a headless service of Kubernetes, or wherever
else somebody looks for them."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from typing import TypeAlias

from genserve.errors import GenserveError, ReplicaNotFoundError
from genserve.fleet.member import Member
from genserve.fleet.router import Router
from genserve.fleet.upstream import Upstream
from genserve.net import joined, split_name
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2

log = logging.getLogger(__name__)

INTERVAL_S = 5.0

FoundAddresses: TypeAlias = AsyncGenerator[Collection[str], None]
"""All addresses at each look. It looks every INTERVAL_S or so, also when nothing has changed."""


class Discovery:
    """Keeps the router's replicas equal to the addresses that discovery returns. One whose address is gone is removed
    when it does not answer any more either: a daemon that ends leaves DNS before it has finished its requests, and a
    name server that fails must not empty the fleet. One that was removed otherwise, such as by the end of a container,
    is added again when another daemon answers at its address."""

    def __init__(self, router: Router, name: str, found: FoundAddresses) -> None:
        """`name`: where it looks, for people."""
        self._router = router
        self._name = name
        self._found = found
        self._mine: dict[str, Upstream] = {}
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
                except Exception:  # a fault of ours: nobody else would find replicas
                    log.exception("taking the replicas of %s failed", self._name)

    async def _take(self, addresses: set[str]) -> None:
        for address in self._mine.keys() - addresses:  # first, because they take the room of new ones
            upstream = self._router.fleet.upstreams.get(address)
            if upstream is None:
                del self._mine[address]
            elif self._router.fleet.where(upstream.member)[0] in (ReplicaState.UNHEALTHY, ReplicaState.CONNECTING):
                with suppress(ReplicaNotFoundError):  # somebody else removes it
                    await self._router.remove(address)
                del self._mine[address]
        missing = sorted(addresses - self._router.fleet.upstreams.keys())
        removed = [self._mine[address] for address in missing if address in self._mine]
        returned = await asyncio.gather(*map(self._has_other_daemon, removed))
        kept_out = {each.address for each, is_other in zip(removed, returned, strict=True) if not is_other}
        for address in sorted(addresses - kept_out):
            known = self._router.fleet.upstreams.get(address)
            self._mine[address] = self._router.add(address) if known is None else known

    async def _has_other_daemon(self, removed: Upstream) -> bool:
        """Whether a daemon answers at the address of a removed replica that is not the one that was there last."""
        connection = self._router.connect(Member(removed.address))
        try:
            asked = control_pb2.GetServerInfoRequest()
            timeout_s = self._router.fleet.settings.connect_timeout_s
            info = await connection.ask(connection.control.GetServerInfo, asked, timeout_s)
        except GenserveError:
            return False
        finally:
            await connection.close()
        return info.state.instance_id != removed.member.instance_id


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
        except Exception:  # a fault of ours: nobody else would find replicas
            log.exception("looking for the replicas of %s failed", host)
        else:
            said = ""
            yield {joined(str(address[0]), port) for *_, address in found}
        await asyncio.sleep(interval_s)
