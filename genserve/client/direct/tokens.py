"""The calls of GenerationService of a client that calls replicas itself."""

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from typing import Final

from genserve.client.direct.calls import DirectCall, DirectGenerate, DirectGenerateMany
from genserve.client.direct.replicas import DirectReplicas
from genserve.client.direct.settings import Direct
from genserve.client.direct.watch import RouterWatch
from genserve.errors import GenserveError
from genserve.forward.destinations import ANY_REQUEST
from genserve.forward.forwarded import Forwarded
from genserve.forward.loss import is_lost
from genserve.forward.waiting import Waiting
from genserve.transport.connection import Connection
from genserve.v1 import generation_pb2

TOKENIZE_TIMEOUT_S: Final = 30.0


class DirectTokens:
    """Begins calls. The router is watched from the first one on, until the client is closed or dropped."""

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
        call = DirectGenerate(self, request, timeout_s)
        self._calls.add(call)
        return call, self._connection.target

    def generate_many(self, timeout_s: float | None) -> tuple[DirectGenerateMany, str]:
        """Begins a call of GenerateMany. Returns it with the router's address; errors of a replica name the replica."""
        self._watch()
        call = DirectGenerateMany(self, timeout_s)
        self._calls.add(call)
        return call, self._connection.target

    async def known_for(self, forwarded: Forwarded) -> None:
        """Returns when a replica can be chosen for a request. Raises GenserveError, and AbortedWhileWaitingError if
        somebody ends it meanwhile."""
        await self.waiting.wait(forwarded.request_id, self.replicas.known_for(forwarded.request))

    async def find(self) -> None:
        """Returns when the replicas are known, as far as they can be."""
        self._watch()
        with contextlib.suppress(GenserveError):  # calls say it again
            await self.replicas.known_for(ANY_REQUEST)

    def abort_waiting(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all, that wait for a replica. Returns their ids."""
        unread = [each for call in self._calls for each in call.abort_unread(request_ids)]
        return [*unread, *self.waiting.abort(request_ids)]

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Token ids from any replica, and from another one if that is lost. Raises GenserveError."""
        tried: set[str] = set()
        while True:
            upstream = await self.replicas.route(ANY_REQUEST, tried, TOKENIZE_TIMEOUT_S)
            try:
                return await upstream.tokenize(request, TOKENIZE_TIMEOUT_S)
            except GenserveError as error:
                if not is_lost(error):
                    raise
                tried.add(upstream.instance_id)

    def stop(self) -> None:
        """The connection is closed: ends everything. Who reads a call is told why by that."""
        if self._watching is not None:
            self._watching.cancel()
        for call in list(self._calls):
            call.cancel()

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
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(watching.cancel)
