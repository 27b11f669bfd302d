"""Servers that accept calls or connections, and do not answer or always answer the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True)
class Asked:
    """A call, and what came with it. `remaining_s` until its deadline; None = it has none."""

    method: str
    metadata: dict[str, str | bytes]
    remaining_s: float | None


class SilentDaemon(grpc.GenericRpcHandler):
    """Takes every call. It answers none, or all of them with `answer`: b"" is a message of any kind without fields.
    `requests` are those that it has answered."""

    def __init__(self) -> None:
        self.target = ""
        self.calls: list[str] = []
        self.asked: list[Asked] = []
        self.num_ended = 0
        self.answer: bytes | None = None
        self.requests: list[bytes] = []

    def service(self, handler_call_details: Any) -> Any:
        """As gRPC asks for it."""
        method = handler_call_details.method

        async def hang(requests: Any, context: Any) -> AsyncIterator[bytes]:
            remaining_s = context.time_remaining()
            no_deadline = remaining_s is None or remaining_s > 1e6
            self.asked.append(Asked(method, dict(context.invocation_metadata()), None if no_deadline else remaining_s))
            self.calls.append(method)
            if self.answer is not None:
                self.requests.append(await anext(requests))
                yield self.answer
                return
            try:
                await asyncio.Event().wait()
            finally:
                self.num_ended += 1

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
