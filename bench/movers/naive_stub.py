"""What one writes first: generated stubs on both sides, 1 MiB a message, a handler that copies each into a buffer.

Also the program that receives.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.processes import Program, obey, serving_port
from genserve.v1 import weights_pb2, weights_pb2_grpc

CHUNK_BYTES = 1 << 20
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class NaiveStub:
    """One call of one channel. Made by `start`."""

    def __init__(self, source: "np.ndarray", program: Program, channel: grpc.aio.Channel) -> None:
        self._source = source
        self._program = program
        self._channel = channel

    @classmethod
    async def start(cls, source: "np.ndarray", directory: Path) -> "NaiveStub":
        """Starts the receiver."""
        program = await Program.of_module("naive_stub", __name__, log=directory / "naive_stub.log").wait_ready()
        port = await program.order(num_bytes=source.nbytes)
        return cls(source, program, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS))

    async def move(self) -> float:
        """Sends all, until the answer is there."""
        stub: Any = weights_pb2_grpc.WeightServiceStub(self._channel)
        source = self._source.data
        began_at = time.monotonic()
        call = stub.PushWeights()
        for offset in range(0, len(source), CHUNK_BYTES):
            chunk = weights_pb2.PushChunk(offset=offset, data=bytes(source[offset : offset + CHUNK_BYTES]))
            await call.write(weights_pb2.PushWeightsRequest(chunk=chunk))
        await call.done_writing()
        response = await call
        if response.push.received_bytes != len(source):
            raise self._program.failure(f"it has received {response.push.received_bytes} bytes")
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Ends the receiver."""
        await self._channel.close()
        self._program.stop()


class Receiver(weights_pb2_grpc.WeightServiceServicer):
    """Copies, and counts."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = bytearray(num_bytes)

    async def PushWeights(self, frames: Any, context: Any) -> weights_pb2.PushWeightsResponse:
        """One push."""
        received_bytes = 0
        async for frame in frames:
            data, offset = frame.chunk.data, frame.chunk.offset
            self._buffer[offset : offset + len(data)] = data
            received_bytes += len(data)
        return weights_pb2.PushWeightsResponse(push=weights_pb2.Push(received_bytes=received_bytes))


async def listen(num_bytes: int) -> int:
    """Listens; the port."""
    server = grpc.aio.server(options=_OPTIONS)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(Receiver(num_bytes), server)  # type: ignore[abstract]
    return await serving_port(server)


if __name__ == "__main__":
    asyncio.run(obey(listen))
