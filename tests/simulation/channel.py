"""Channels over the network in memory."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc.aio

from genserve.security.caller import Caller, Options
from tests.simulation.calls import MemoryCall
from tests.simulation.network import Network
from tests.simulation.virtual_time import PROCESS


class MemoryCaller(Caller):
    """Opens channels over the network in memory, from the host of the program that calls it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def aio_channel(self, address: str, options: Options) -> Any:
        return MemoryChannel(self._network, address)


class MemoryChannel:
    """grpc.aio.Channel, as far as a fleet needs it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: dict[MemoryCall, None] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()

    async def channel_ready(self) -> None:
        """Waits until somebody listens there, who can be reached."""
        process = PROCESS.get()
        link = self._network.link(process.host if process is not None else "", self._address)
        while link.is_cut or self._network.server_at(self._address) is None:
            await self._network.changed.wait()
        await asyncio.sleep(self._network.delay_s())

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(method, request_serializer, response_deserializer, is_unary=True)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(method, request_serializer, response_deserializer, is_unary=False)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(method, request_serializer, response_deserializer, is_unary=True, streams=True)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def refuse(*args: Any, **options: Any) -> None:
            raise NotImplementedError(f"{method}: clients of the simulation call Generate")

        return refuse

    def _method(
        self,
        method: str,
        serialize: Any,
        parse: Callable[[bytes], Any] | None,
        *,
        is_unary: bool,
        streams: bool = False,
    ) -> Callable[..., MemoryCall]:
        def begin(request: Any, timeout: float | None = None, metadata: Any = None, **_: Any) -> MemoryCall:
            if self._is_closed:
                raise grpc.aio.UsageError("Channel is closed.")
            call = MemoryCall(parse, is_unary=is_unary)
            self._calls[call] = None
            call.add_done_callback(lambda done: self._calls.pop(done, None))
            if streams:
                requests: Any = request if serialize is None else (serialize(each) async for each in request)
            else:
                requests = [request if serialize is None else serialize(request)]
            call.begin(self._network, self._address, method, timeout, tuple(metadata or ()), requests)
            return call

        return begin
