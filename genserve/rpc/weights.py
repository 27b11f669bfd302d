"""WeightService."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from genserve.control.state import StateBoard
from genserve.engine.base import Engine, WeightDigest
from genserve.errors import InvalidFieldError, PushTruncatedError
from genserve.rpc.convert_weights import push_header, to_get_push_response, to_push_response, to_weights_response
from genserve.v1 import weights_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceServicer
from genserve.weights.checkpoint import CheckpointIndex
from genserve.weights.registry import PushRegistry
from genserve.weights.stream import PushStream

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

DIGESTS_TIMEOUT_S = 300.0

Frames = AsyncIterator[weights_pb2.PushWeightsRequest]


class WeightServicer(WeightServiceServicer):
    """Takes weights into the push registry. Without a `checkpoint` GetWeights tells no manifest."""

    def __init__(
        self, registry: PushRegistry, engine: Engine, board: StateBoard, checkpoint: CheckpointIndex | None
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._board = board
        self._manifest = checkpoint.as_manifest() if checkpoint is not None else None

    async def PushWeights(
        self, request_iterator: Frames, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.PushWeightsResponse:
        """Stages the chunks of a stream and answers what came of the push."""
        frames = aiter(request_iterator)
        header = await _read_header(frames)
        if header.HasField("manifest"):
            self._registry.check_num_tensors(len(header.manifest.tensors))
        # A manifest of a large model takes long to convert: token streams shall not wait for it.
        stream = await self._registry.open(await asyncio.to_thread(push_header, header))
        try:
            async with _until_expired(stream):
                await _read_chunks(frames, stream)
            outcome = await stream.finish()
        finally:
            stream.detach()
        return to_push_response(outcome, self._board.state())

    async def GetPush(
        self, request: weights_pb2.GetPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetPushResponse:
        """How far a push has come."""
        return to_get_push_response(self._registry.report(request.push_id), self._board.state())

    async def GetWeights(
        self, request: weights_pb2.GetWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetWeightsResponse:
        """What is served."""
        digests: Sequence[WeightDigest] = ()
        if request.include_digests:
            digests = await self._engine.weight_digests(DIGESTS_TIMEOUT_S)
        return to_weights_response(self._engine.weight_version, self._manifest, digests, self._board.state())


async def _read_header(frames: Frames) -> weights_pb2.PushHeader:
    first = await anext(frames, None)
    if first is None or first.WhichOneof("frame") != "header":
        raise InvalidFieldError.of("frame", "the first one must be a header")
    return first.header


async def _read_chunks(frames: Frames, stream: PushStream) -> None:
    """Writes chunks until the end frame. On the event loop: checksum and copy of 1 MiB take as long as handing them to
    a thread would, and less than a token's message."""
    async for frame in frames:
        kind = frame.WhichOneof("frame")
        if kind == "chunk":
            chunk = frame.chunk
            stream.write(chunk.offset, chunk.data, chunk.crc32c if chunk.HasField("crc32c") else None)
        elif kind == "end":
            async for _ in frames:
                raise InvalidFieldError.of("frame", "nothing may follow the end")
            return
        else:
            raise InvalidFieldError.of("frame", f"{kind or 'an unknown one'} cannot come here")
    raise PushTruncatedError(
        "the stream was closed without an end frame; what arrived stays staged", metadata={"push_id": stream.push_id}
    )


@asynccontextmanager
async def _until_expired(stream: PushStream) -> AsyncIterator[None]:
    """Leaves its body when the push has timed out, quietly: `finish` tells then."""
    limit = asyncio.timeout(None)

    async def expire() -> None:
        await stream.wait_expired()
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            watcher = asyncio.create_task(expire())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
