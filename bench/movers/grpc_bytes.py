"""The least that gRPC costs in Python: one stream of messages of 1 MiB, the same bytes again and again, which the
receiver throws away. No protobuf, no buffer, no checksum. Also the program that receives."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc.aio

from bench.processes import Program, obey, serving_port
from genserve.rpc.listener import SERVER_OPTIONS

CHUNK_BYTES = 1 << 20
_METHOD = "/floor.Bytes/Push"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcBytes:
    """One call of one channel, with the daemon's settings of HTTP/2. Made by `start`."""

    def __init__(self, num_bytes: int, program: Program, channel: grpc.aio.Channel) -> None:
        self._num_bytes = num_bytes
        self._program = program
        self._channel = channel

    @classmethod
    async def start(cls, num_bytes: int, directory: Path) -> "GrpcBytes":
        """Starts the receiver."""
        program = await Program.of_module("grpc_bytes", __name__, log=directory / "grpc_bytes.log").wait_ready()
        port = await program.order()
        options = [*_OPTIONS, ("grpc.http2.max_frame_size", 4 << 20)]
        return cls(num_bytes, program, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))

    async def move(self) -> float:
        """Sends as many bytes, until the answer is there."""
        method: Any = self._channel.stream_unary(_METHOD)
        chunk = bytes(CHUNK_BYTES)
        began_at = time.monotonic()
        call = method()
        for offset in range(0, self._num_bytes, CHUNK_BYTES):
            await call.write(chunk[: self._num_bytes - offset])
        await call.done_writing()
        received_bytes = int(await call)
        if received_bytes != self._num_bytes:
            raise self._program.failure(f"it has received {received_bytes} bytes")
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Ends the receiver."""
        await self._channel.close()
        self._program.stop()


async def push(frames: Any, context: Any) -> bytes:
    """Counts."""
    received_bytes = 0
    async for frame in frames:
        received_bytes += len(frame)
    return str(received_bytes).encode()


async def listen() -> int:
    """Listens; the port."""
    server = grpc.aio.server(options=[*SERVER_OPTIONS, *_OPTIONS])
    handler: Any = grpc.stream_unary_rpc_method_handler(push)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Bytes", {"Push": handler}),))
    return await serving_port(server)


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    asyncio.run(obey(listen))
