"""The watch of a client over its router."""

import asyncio
import gc
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from genserve.client import Direct
from genserve.client.direct.replicas import DirectReplicas
from genserve.client.direct.tokens import RouterWatch
from genserve.v1 import fleet_pb2
from tests.support.patience import turns


class BreakingCall:
    """Is answered once, and breaks before it can be cancelled."""

    def __init__(self) -> None:
        self.is_answered, self.broken = False, asyncio.Event()

    async def read(self) -> fleet_pb2.WatchReplicasResponse:
        if self.is_answered:
            await self.broken.wait()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        self.is_answered = True
        return fleet_pb2.WatchReplicasResponse()

    def cancel(self) -> None:
        self.broken.set()


async def test_call_that_breaks_unawaited_logs_no_error_of_the_loop() -> None:
    """Somebody has asked for news in the same moment, which the next call brings."""
    calls: list[BreakingCall] = []
    told: list[dict[str, Any]] = []

    def watch_replicas(*_: Any, **__: Any) -> BreakingCall:
        calls.append(BreakingCall())
        return calls[-1]

    service = SimpleNamespace(WatchReplicas=watch_replicas)
    connection: Any = SimpleNamespace(metadata=(), target="router", fleet=service, typed_errors=nullcontext)
    replicas = DirectReplicas(connection, Direct())
    watching = asyncio.create_task(RouterWatch(connection, replicas, Direct()).run())
    loop = asyncio.get_running_loop()
    gc.collect()  # what other tests have left
    loop.set_exception_handler(lambda _, context: told.append(context))
    try:
        await turns()
        replicas.asks.set()
        await turns()
        assert [call.is_answered for call in calls] == [True, True]
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await turns()
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert told == []
