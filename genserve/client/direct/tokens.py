"""The calls of GenerationService of a client that calls replicas itself, and the watch over the router, which names
them."""

import asyncio
import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from genserve.aio import Backoff, silence
from genserve.client.direct.calls import DirectCall, DirectGenerate, DirectGenerateMany
from genserve.client.direct.replicas import DirectReplicas
from genserve.client.direct.settings import Direct
from genserve.errors import GenserveError, UnavailableError, UnsupportedError
from genserve.forward.caller import Waiting
from genserve.forward.destinations import ANY_REQUEST
from genserve.transport.connection import Connection
from genserve.transport.errors import ClientClosedError
from genserve.v1 import fleet_pb2, generation_pb2
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
            with self._connection.typed_errors():
                async with silence(silence_s):
                    told = await call.read()
        except TimeoutError:
            raise UnavailableError(f"the router at {target} has said nothing for {silence_s:g} s") from None
        except UnsupportedError as error:
            raise UnsupportedError(f"direct needs a router, such as genserve route: {error.message}") from None
        if not isinstance(told, fleet_pb2.WatchReplicasResponse):
            raise UnavailableError(f"the router at {target} has shut down")
        return told


class DirectTokens:
    """Begins calls. The router is watched from the first one on, until the client is closed, or dropped and no
    call runs."""

    def __init__(self, connection: Connection, settings: Direct) -> None:
        self.waiting = Waiting()
        self.replicas = DirectReplicas(connection, settings)
        self._connection = connection
        self._settings = settings
        self._calls: weakref.WeakSet[DirectCall] = weakref.WeakSet()
        self._watching: asyncio.Task[None] | None = None
        me = weakref.ref(self)  # the connection is there for as long as it is watched: it must not keep this alive
        connection.on_close(lambda: None if (tokens := me()) is None else tokens.stop())

    def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> tuple[DirectGenerate, str]:
        """Begins a call of Generate. Returns it with the router's address; errors of a replica name the replica."""
        self._watch()
        call = DirectGenerate(self.replicas, self.waiting, request, timeout_s)
        self._begun(call)
        return call, self._connection.target

    def generate_many(self, timeout_s: float | None) -> tuple[DirectGenerateMany, str]:
        """Begins a call of GenerateMany. Returns it with the router's address; errors of a replica name the replica."""
        self._watch()
        call = DirectGenerateMany(self.replicas, self.waiting, timeout_s)
        self._begun(call)
        return call, self._connection.target

    async def find(self) -> None:
        """Returns when the replicas are known, as far as they can be."""
        self._watch()
        with suppress(GenserveError):  # calls say it again
            await self.replicas.known_for(ANY_REQUEST)

    def abort_waiting(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all, that wait for a replica. Returns their ids."""
        unread = [each for call in self._calls for each in call.abort_unread(request_ids)]
        return [*unread, *self.waiting.abort(request_ids)]

    def stop(self) -> None:
        """The connection is closed: ends everything. Readers of a call get the reason."""
        if self._watching is not None:
            self._watching.cancel()
        for call in list(self._calls):
            call.cancel()

    def _begun(self, call: DirectCall) -> None:
        self._calls.add(call)
        call.keep(self)  # or the router would be watched no more when the client is dropped and the call is still read

    def _watch(self) -> None:
        """Raises ClientClosedError and ClientMisuseError."""
        _ = self._connection.channel  # is refused on another loop, and after the end
        if self._watching is None:
            loop = asyncio.get_running_loop()
            watch = RouterWatch(self._connection, self.replicas, self._settings)
            self._watching = loop.create_task(watch.run(), name="watching a router")
            weakref.finalize(self, _cancel, loop, self._watching).atexit = False


def _cancel(loop: asyncio.AbstractEventLoop, watching: "asyncio.Task[None]") -> None:
    """Called on any thread by the garbage collector."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(watching.cancel)
