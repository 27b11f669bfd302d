"""One receiving process: `python -m genserve.ingest`, started by `IngestProcesses` with its settings as JSON."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from genserve.ingest.protocol import FAILED, METHOD, OUTCOME, PATH_KEY, SERVICE
from genserve.ingest.ring import ChunkRing
from genserve.memory.allocator import keep_freed_memory
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import parse_chunk

_RING_BYTES = 32 << 20
_NICENESS = 5  # generation goes first
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """Where to listen, and where the daemon does. `port` 0 picks one."""

    host: str
    port: int
    daemon: str
    max_message_bytes: int
    options: tuple[tuple[str, int], ...]

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From the command line."""
        fields = json.loads(text)
        return cls(**{**fields, "options": tuple(map(tuple, fields["options"]))})


def main(argv: list[str]) -> int:
    """Serves until stdin ends: the daemon holds the other end, so the process never outlives it."""
    # Ctrl-C in a terminal is the daemon's, which ends this process when it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.nice(_NICENESS)
    keep_freed_memory()
    asyncio.run(serve(IngestSettings.from_json(argv[0])))
    return 0


async def serve(settings: IngestSettings) -> None:
    """Prints the port it listens on, and serves."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(settings.daemon, options=unlimited) as daemon:
        server = grpc.aio.server(
            options=[*settings.options, ("grpc.max_receive_message_length", settings.max_message_bytes)]
        )
        push: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(
            Relay(daemon, settings.max_message_bytes).push_weights
        )
        handler = grpc.method_handlers_generic_handler("genserve.v1.WeightService", {"PushWeights": push})
        server.add_generic_rpc_handlers((handler,))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        port = server.add_insecure_port(f"{host}:{settings.port}")
        await server.start()
        print(port, flush=True)
        await _end_of_stdin()
        await server.stop(_GRACE_S)


class Relay:
    """Passes pushes on to the daemon; `max_message_bytes` is what the daemon takes."""

    def __init__(self, daemon: grpc.aio.Channel, max_message_bytes: int) -> None:
        self._daemon = daemon
        self._max_message_bytes = max_message_bytes

    async def push_weights(self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        """A stream of a client's, answered as the daemon answers it."""
        ring = ChunkRing(max(_RING_BYTES, self._max_message_bytes))
        metadata = tuple((k, v) for k, v in context.invocation_metadata() or () if k == "authorization")
        method: Any = self._daemon.stream_stream(f"/{SERVICE}/{METHOD}")
        call = method(metadata=(*metadata, (PATH_KEY, ring.path)), timeout=context.time_remaining())
        sending = asyncio.create_task(self._send(frames, call, ring))
        try:
            async for answer in call:
                if answer.startswith(OUTCOME):
                    return bytes(answer[len(OUTCOME) :])
                if answer.startswith(FAILED):
                    status = status_pb2.Status.FromString(answer[len(FAILED) :])
                    await context.abort_with_status(rpc_status.to_status(status))
                ring.acknowledge()
            raise RuntimeError("the daemon ended a push without an answer")
        except grpc.aio.AioRpcError as error:
            # The daemon is gone, or the client's deadline has passed.
            await context.abort(error.code(), error.details() or "")
        finally:
            sending.cancel()
            call.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            ring.close()

    async def _send(self, frames: AsyncIterator[bytes], call: Any, ring: ChunkRing) -> None:
        try:
            async for frame in frames:
                await call.write(await self._passed_on(frame, ring))
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.RpcError):
            return  # the daemon has answered, which is being read

    async def _passed_on(self, frame: bytes, ring: ChunkRing) -> bytes:
        chunk = parse_chunk(frame)
        # What is wrong goes on as it is: the daemon says so.
        if chunk is None or (chunk.crc32c is not None and crc32c_of(chunk.data) != chunk.crc32c):
            ring.pass_by()
            return frame
        return await ring.put(chunk.offset, chunk.data)


async def _end_of_stdin() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
