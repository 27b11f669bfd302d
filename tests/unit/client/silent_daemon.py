"""Servers that accept and never answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio


class SilentDaemon(grpc.GenericRpcHandler):
    """Takes every call, and never answers one."""

    def __init__(self) -> None:
        self.target = ""
        self.calls: list[str] = []
        self.num_ended = 0

    def service(self, handler_call_details: Any) -> Any:
        """As gRPC asks for it."""
        method = handler_call_details.method

        async def hang(requests: Any, context: Any) -> AsyncIterator[bytes]:
            self.calls.append(method)
            try:
                await asyncio.Event().wait()
            finally:
                self.num_ended += 1
            yield b""

        return grpc.stream_stream_rpc_method_handler(hang)


@asynccontextmanager
async def silent_daemon() -> AsyncIterator[SilentDaemon]:
    """One that speaks gRPC."""
    daemon, server = SilentDaemon(), grpc.aio.server()
    server.add_generic_rpc_handlers((daemon,))
    daemon.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield daemon
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def silent_socket() -> AsyncIterator[str]:
    """One that does not even greet; gives its address."""
    writers = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
