"""The client for asyncio: one connection and the calls of all services."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self, Unpack

from genserve.client.control import ControlCalls
from genserve.client.direct.settings import Direct, direct_settings
from genserve.client.fleet import FleetCalls
from genserve.client.generation.calls import GenerationCalls
from genserve.client.weights.lora import LoraCalls
from genserve.client.weights.vllm_transfer import TransferCalls
from genserve.transport.connection import Connection
from genserve.transport.settings import ConnectionSettings


class AsyncClient(GenerationCalls, LoraCalls, TransferCalls, ControlCalls, FleetCalls):
    """Talks to the daemon at `target`: "host:port", "dns:///name:port" or "unix:/path".

    Use it with `async with`, or call `close`. It connects with the first call and belongs to the event loop of that
    call; any number of calls may run at once. Every call has a deadline (`Timeouts`) and raises a class of
    `genserve.errors`, or `UnavailableError` when no daemon answers. Cancelling a call cancels it in the daemon. On
    another loop, and in a process forked after the first call, it raises ClientMisuseError.

    `target` may be a router. With `direct=True`, requests for tokens go straight to its replicas, which the client then
    watches and chooses among itself (`Direct` has the settings); all other calls go to the router.

        async with AsyncClient("127.0.0.1:50051") as client:
            generation = await client.generate("Once upon a time", max_tokens=16, logprobs=0)
            async with client.paused() as lease:
                await client.push_weights(model, version=1, pause_lease_id=lease.lease_id)
    """

    def __init__(
        self, target: str | None = None, *, direct: bool | Direct = False, **settings: Unpack[ConnectionSettings]
    ) -> None:
        super().__init__(Connection(target, **settings), direct_settings(direct))

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until the daemon says that it is serving. The daemon need not be started yet.

        Raises DeadlineError, which names the phase of a daemon that answers. Nobody else may wake up a daemon that
        sleeps. If the daemon has front ends (`genserve serve --frontends`), the client is connected to them then, also
        for a first call that is a long `stream_many`. Other calls do not wait for this: until then, they go to the
        daemon itself.
        """
        began_s = asyncio.get_running_loop().time()
        await super().wait_ready(timeout_s)
        limit_s = Connection.grpc_timeout_s(timeout_s, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if limit_s is None else began_s + limit_s):
                await self._tokens.find()

    async def close(self) -> None:
        """Closes the connection; calls in progress raise ClientClosedError, and so does every later one."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
