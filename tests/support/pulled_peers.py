"""Weights of a few mebibytes, and peers that do not send them as they should."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np

from genserve.client import AsyncClient
from genserve.errors import PushNotFoundError
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import chunk_frame
from genserve.tensors.safetensors import StoredTensor
from genserve.v1 import weights_pb2
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.wire.conversions import manifest_message
from tests.support.paced_push import PacedPush

MIB = 1 << 20
CHECKPOINT = CheckpointIndex(
    {"a": CheckpointTensor("U8", (3 * MIB,), 3 * MIB), "b": CheckpointTensor("U8", (2 * MIB + 5,), 2 * MIB + 5)}
)
TOTAL_BYTES = 5 * MIB + 5


def weights(version: int) -> dict[str, StoredTensor]:
    """Other bytes for each version."""
    data = _bytes(version)
    views = memoryview(data)[: 3 * MIB], memoryview(data)[3 * MIB :]
    return {name: StoredTensor(name, "U8", (len(view),), view) for name, view in zip("ab", views, strict=True)}


@functools.cache
def _bytes(version: int) -> bytes:
    return np.random.default_rng(version).integers(0, 256, TOTAL_BYTES, np.uint8).tobytes()


def content(version: int) -> dict[str, bytes]:
    """What an engine that serves the version has."""
    return {name: bytes(tensor.data) for name, tensor in weights(version).items()}


class LyingPeer:
    """Answers PullWeights with these bytes, as `push_id`; breaks after `breaks_after` bytes, and in later calls after
    `breaks_again_after`."""

    def __init__(
        self,
        data: bytes,
        push_id: str,
        breaks_after: int | None = None,
        stalls: bool = False,
        breaks_again_after: int | None = None,
        origin: str = "",
    ) -> None:
        self._data = data
        self._push_id = push_id
        self.origin = origin or f"origin of {push_id}"
        self._breaks_after = breaks_after
        self._breaks_again_after = breaks_again_after
        self._stalls = stalls
        self.asked: list[list[tuple[int, int]]] = []

    async def pull(self, request: weights_pb2.PullWeightsRequest, context: Any) -> AsyncIterator[bytes]:
        self.asked.append([(each.start, each.end) for each in request.ranges])
        header = weights_pb2.PushHeader(
            push_id=self._push_id,
            attempt=self.origin,
            weight_version=1,
            manifest=manifest_message(CHECKPOINT.as_manifest()),
        )
        yield weights_pb2.PullWeightsResponse(header=header).SerializeToString()
        num_sent = 0
        for start, end in self.asked[-1] or [(0, len(self._data))]:
            for position in range(start, end, MIB):
                limit = self._breaks_after if len(self.asked) == 1 else self._breaks_again_after
                if limit is not None and num_sent >= limit:
                    if self._stalls:
                        await asyncio.Event().wait()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                piece = self._data[position : min(position + MIB, end)]
                num_sent += len(piece)
                yield chunk_frame(position, [piece], crc32c_of(piece))
        yield weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd()).SerializeToString()


@asynccontextmanager
async def listening(peer: LyingPeer) -> AsyncIterator[str]:
    """The address of a server that is this peer."""
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        peer.pull, request_deserializer=weights_pb2.PullWeightsRequest.FromString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("genserve.v1.WeightService", {"PullWeights": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def data_of(version: int) -> bytes:
    """The byte space of a version."""
    return b"".join(content(version)[name] for name in "ab")


def sending(address: str, version: int, push_id: str, content_of: int = 0) -> PacedPush:
    """A push of a version whose bytes, those of `content_of` if that is given, the test sends."""
    header = weights_pb2.PushHeader(
        push_id=push_id, weight_version=version, manifest=manifest_message(CHECKPOINT.as_manifest()), attempt="1"
    )
    return PacedPush(address, header, data_of(content_of or version))


async def until_received(client: AsyncClient, push_id: str, received_bytes: int) -> None:
    """Waits until a push has so many bytes."""
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get_push(push_id)).push.received_bytes >= received_bytes:
                    return
            except PushNotFoundError:
                pass
            await asyncio.sleep(0.005)
