"""The router, watched for what it tells of its replicas."""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import grpc.aio

from genserve.aio.backoff import Backoff
from genserve.aio.silence import silence
from genserve.client.direct.replicas import DirectReplicas
from genserve.client.direct.settings import Direct
from genserve.errors import GenserveError, UnavailableError, UnsupportedError
from genserve.transport.connection import Connection
from genserve.transport.errors import ClientClosedError, error_of
from genserve.v1 import fleet_pb2
from genserve.wire.conversions import duration_of

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

    WatchCall = UnaryStreamCall[fleet_pb2.WatchReplicasRequest, fleet_pb2.WatchReplicasResponse]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0


class RouterWatch:
    """Keeps what a client knows of the replicas up to date. It has its own deadline: a host that vanishes leaves a TCP
    connection that says nothing for many minutes."""

    def __init__(self, connection: Connection, replicas: DirectReplicas, settings: Direct) -> None:
        self._connection = connection
        self._replicas = replicas
        self._settings = settings
        self._request = fleet_pb2.WatchReplicasRequest(interval=duration_of(settings.report_interval_s))
        self._backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)

    async def run(self) -> None:
        """Watches until it is cancelled, and calls again whenever the router is lost, or somebody asks for news."""
        try:
            while True:
                number = self._replicas.begin()
                try:
                    await self._watch(number)
                except ClientClosedError:
                    return
                except GenserveError as error:
                    self._replicas.miss(error, number)
                    await self._pause()
                except Exception as error:  # a fault of ours: without a watch, every request would wait in vain
                    log.exception("watching the router at %s failed", self._connection.target)
                    self._replicas.miss(GenserveError(f"the client failed to watch its router: {error!r}"), number)
                    await self._pause()
        finally:
            self._replicas.stop()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next_s()):
                await self._replicas.asks.wait()

    async def _watch(self, number: int) -> None:
        """One call. Returns when somebody asks for an answer to a newer one."""
        metadata = self._connection.metadata
        call = self._connection.fleet.WatchReplicas(self._request, metadata=metadata)
        asked = asyncio.create_task(self._replicas.asks.wait())
        reading: asyncio.Task[fleet_pb2.WatchReplicasResponse] | None = None
        try:
            is_first = True
            while True:
                reading = asyncio.create_task(self._next(call))
                if not is_first:
                    await asyncio.wait({reading, asked}, return_when=asyncio.FIRST_COMPLETED)
                    if not reading.done():
                        return
                self._replicas.tell(await reading, number)
                self._backoff.reset()
                is_first = False
        finally:
            asked.cancel()
            call.cancel()
            if reading is not None:
                reading.cancel()

    async def _next(self, call: "WatchCall") -> fleet_pb2.WatchReplicasResponse:
        silence_s, target = self._settings.silence_s, self._connection.target
        try:
            async with silence(silence_s):
                told = await call.read()
        except TimeoutError:
            raise UnavailableError(f"the router at {target} has said nothing for {silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            failure = error_of(error, target)
            if isinstance(failure, UnsupportedError):
                failure = UnsupportedError(f"direct needs a router, such as genserve route: {failure.message}")
            raise failure from None
        if not isinstance(told, fleet_pb2.WatchReplicasResponse):
            raise UnavailableError(f"the router at {target} has shut down")
        return told
