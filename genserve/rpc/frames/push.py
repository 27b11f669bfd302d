"""The frames of a push as they arrive: what may come when, and the end of those who send nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from genserve.errors import DeadlineError, InvalidFieldError, ManifestMismatchError, PushTruncatedError
from genserve.memory.segment import SegmentChunk
from genserve.tensors.chunk_frame import Chunk, chunk_start, parse_chunk
from genserve.v1 import weights_pb2
from genserve.weights.push.segments import SegmentReader
from genserve.weights.push.stream import PushStream

HEADER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OversizedFrame:
    """A frame that is neither a chunk nor small enough to be an honest header. Sizes are bytes."""

    size_bytes: int
    limit_bytes: int


Frame: TypeAlias = Chunk | weights_pb2.PushWeightsRequest | OversizedFrame
Frames: TypeAlias = AsyncIterator[Frame]


def frame_parser(max_header_bytes: int | None) -> Callable[[bytes], Frame]:
    """A deserializer that builds no objects for a chunk, and none for a header above `max_header_bytes`: as objects a
    manifest of a million tensors takes several times its bytes."""

    def parse(data: bytes) -> Frame:
        chunk = parse_chunk(data)
        if chunk is not None:
            return chunk
        if max_header_bytes is not None and len(data) > max_header_bytes and chunk_start(data) is None:
            return OversizedFrame(len(data), max_header_bytes)
        message = weights_pb2.PushWeightsRequest.FromString(data)
        if message.WhichOneof("frame") == "chunk":
            found = message.chunk
            return Chunk(found.offset, found.data, found.crc32c if found.HasField("crc32c") else None)
        return message

    return parse


async def read_header(frames: Frames) -> weights_pb2.PushHeader:
    """The first frame. Raises InvalidFieldError for another one, ManifestMismatchError for one that is too large to be
    right, DeadlineError when none comes."""
    try:
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            first = await anext(frames, None)
    except TimeoutError:
        raise DeadlineError(f"no header came within {HEADER_TIMEOUT_S:g} s") from None
    if isinstance(first, OversizedFrame):
        raise ManifestMismatchError(
            f"the header has {first.size_bytes} bytes; no manifest for this checkpoint needs more than "
            f"{first.limit_bytes}"
        )
    if not isinstance(first, weights_pb2.PushWeightsRequest) or first.WhichOneof("frame") != "header":
        raise InvalidFieldError.of("frame", "the first one must be a header")
    return first.header


async def read_chunks(frames: Frames, stream: PushStream, segments: SegmentReader | None) -> None:
    """Writes chunks until the end frame. On the event loop: checksum and copy of 1 MiB take as long as handing them to
    a thread would, and less than a token's message. `segments` copies shared memory; None refuses it."""
    ended = False
    try:
        async for frame in frames:
            if isinstance(frame, Chunk):
                while stream.is_claimed(frame.offset, len(frame.data)):
                    await stream.wait_settled()
                stream.write(frame.offset, frame.data, frame.crc32c)
                continue
            kind = frame.WhichOneof("frame") if isinstance(frame, weights_pb2.PushWeightsRequest) else "header"
            if kind == "segment" and isinstance(frame, weights_pb2.PushWeightsRequest):
                if segments is None:
                    raise InvalidFieldError.of("segment", "only a peer on the daemon's own host may hand memory over")
                await segments.take(stream, _segment_chunk(frame.segment))
                continue
            if kind != "end":
                raise InvalidFieldError.of("frame", f"{kind or 'an unknown one'} cannot come here")
            async for _ in frames:
                raise InvalidFieldError.of("frame", "nothing may follow the end")
            ended = True
        if segments is not None:
            await segments.finish()
    finally:
        if segments is not None:
            await segments.close()
    if ended:
        return
    raise PushTruncatedError(
        "the stream was closed without an end frame; what arrived stays staged", metadata={"push_id": stream.push_id}
    )


def is_local(peer: str) -> bool:
    """Whether gRPC's name of a peer is of one on this host."""
    return peer.startswith(("unix:", "unix-abstract:", "ipv4:127.", "ipv6:%5B::1%5D:", "ipv6:[::1]:"))


def _segment_chunk(message: weights_pb2.PushSegment) -> SegmentChunk:
    crc32c = message.crc32c if message.HasField("crc32c") else None
    return SegmentChunk(
        message.path, message.segment_offset, message.offset, message.length, crc32c, message.taken_path
    )


@asynccontextmanager
async def until_expired(stream: PushStream) -> AsyncIterator[None]:
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
