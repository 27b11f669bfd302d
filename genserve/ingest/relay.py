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
from google.rpc import status_pb2
from grpc_status import rpc_status

from genserve.memory.allocator import keep_freed_memory
from genserve.memory.ring import PIECE_BYTES, SharedRing
from genserve.net import joined
from genserve.observe import trace
from genserve.security.certificates import server_credentials
from genserve.security.files import CertificateFiles
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import parse_chunk
from genserve.wire.conversions import segment_frame

# The protocol between a receiving process and the daemon, in addition to the frames of a push.
SERVICE = "genserve.internal.Ingest"
METHOD = "Push"

ADMIT = "Admit"
"""Asked before a push, because only the daemon knows the callers: whether the caller may push."""

SAN_KEY = "genserve-caller-san-bin"
"""Metadata of ADMIT: a subject alternative name of the caller's certificate."""

PATH_KEY = "genserve-ingest-path"
"""Metadata: the only memory that segments of this stream may use."""

ACK_PATH_KEY = "genserve-ingest-ack-path"
"""Metadata: the pipe on which the daemon acknowledges them, and no other."""

OUTCOME = b"\x01"
"""The one answer begins with it: the response follows."""

FAILED = b"\x02"
"""Or with this: a `google.rpc.Status` follows. The status of a call is lost to a write that comes too late."""

_NICENESS = 5  # generation has precedence
_GRACE_S = 1.0
_ADMISSION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """The addresses of this process and of the daemon. `port` 0 picks one; `certificate`: for TLS there, None = none;
    `asks`: whether the daemon has to be asked who may push."""

    host: str
    port: int
    daemon: str
    options: tuple[tuple[str, int], ...]
    certificate: CertificateFiles | None = None
    asks: bool = False

    def to_json(self) -> str:
        """The settings as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings from a command-line argument."""
        fields = json.loads(text)
        certificate = fields["certificate"] and CertificateFiles(**fields["certificate"])
        return cls(**{**fields, "options": tuple(map(tuple, fields["options"])), "certificate": certificate})


def main(argv: list[str]) -> int:
    """Serves until stdin ends. The daemon holds the other end, so the process never outlives it."""
    # Ctrl-C in a terminal is for the daemon, which ends this process after draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.nice(_NICENESS)
    keep_freed_memory()
    asyncio.run(serve(IngestSettings.from_json(argv[0])))
    return 0


async def serve(settings: IngestSettings) -> None:
    """Prints its port, and serves."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(settings.daemon, options=unlimited) as daemon:
        server = grpc.aio.server(options=settings.options)
        relay = Relay(daemon, asks=settings.asks)
        push: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(relay.push_weights)
        handler = grpc.method_handlers_generic_handler("genserve.v1.WeightService", {"PushWeights": push})
        server.add_generic_rpc_handlers((handler,))
        address = joined(settings.host, settings.port)
        if settings.certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(settings.certificate))
        await server.start()
        print(port, flush=True)
        await _end_of_stdin()
        await server.stop(_GRACE_S)


class Relay:
    """Passes pushes on to the daemon."""

    def __init__(self, daemon: grpc.aio.Channel, *, asks: bool) -> None:
        """`asks`: whether to ask the daemon if the caller may push."""
        self._daemon = daemon
        self._asks = asks

    async def _require_admission(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Ends the call as the daemon says unless the caller may push."""
        metadata = [(k, v) for k, v in context.invocation_metadata() or () if k == "authorization"]
        metadata += [(SAN_KEY, san) for san in context.auth_context().get("x509_subject_alternative_name", ())]
        admit: Any = self._daemon.unary_unary(f"/{SERVICE}/{ADMIT}")
        try:
            await admit(b"", metadata=tuple(metadata), timeout=_ADMISSION_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            code, details, trailing = error.code(), error.details() or "", error.trailing_metadata() or ()
        else:
            return
        await context.abort(code, details, tuple(trailing))

    async def push_weights(self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        """Handles one stream of a client. The answer is the daemon's."""
        if self._asks:
            await self._require_admission(context)
        ring = SharedRing()
        metadata = [(k, v) for k, v in context.invocation_metadata() or () if k in trace.HEADERS]
        metadata += [(PATH_KEY, ring.path), (ACK_PATH_KEY, ring.ack_path)]
        method: Any = self._daemon.stream_stream(f"/{SERVICE}/{METHOD}")
        call = method(metadata=tuple(metadata), timeout=context.time_remaining())
        sending = asyncio.create_task(self._send(frames, call, ring))
        answer: bytes = b""
        try:
            # To its end: a call of which only the answer has been read counts as cancelled in the daemon's metrics.
            async for message in call:
                answer = message
        except grpc.aio.AioRpcError as error:
            if not answer:  # the daemon is gone, or the client's deadline has passed
                await context.abort(error.code(), error.details() or "")
        finally:
            sending.cancel()
            call.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            ring.close()
        if answer.startswith(OUTCOME):
            return answer[len(OUTCOME) :]
        if answer.startswith(FAILED):
            status = status_pb2.Status.FromString(answer[len(FAILED) :])
            await context.abort_with_status(rpc_status.to_status(status))
        raise RuntimeError("the daemon ended a push without an answer")

    async def _send(self, frames: AsyncIterator[bytes], call: Any, ring: SharedRing) -> None:
        try:
            async for frame in frames:
                await _pass_on(frame, call, ring)
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.RpcError):
            return  # the daemon has answered, and its answer is being read


async def _pass_on(frame: bytes, call: Any, ring: SharedRing) -> None:
    """Writes the bytes of a chunk to the ring, and to the daemon where they lie; any other frame as it is."""
    chunk = parse_chunk(frame)
    # An invalid frame is passed on: the daemon answers with the error.
    if chunk is None or (chunk.crc32c is not None and crc32c_of(chunk.data) != chunk.crc32c):
        await call.write(frame)
        return
    for start in range(0, max(len(chunk.data), 1), PIECE_BYTES):
        piece = await ring.put([chunk.data[start : start + PIECE_BYTES]])
        await call.write(segment_frame(chunk.offset + start, piece))


async def _end_of_stdin() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
