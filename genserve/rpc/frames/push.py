"""The frames of a push: their order, and timeouts for clients that send nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeAlias

from genserve.errors import DeadlineError, InvalidFieldError, ManifestMismatchError, PushTruncatedError
from genserve.memory.segment import SegmentChunk
from genserve.tensors.chunk_frame import Chunk, chunk_start, parse_chunk
from genserve.v1 import weights_pb2
from genserve.weights.push.segments import SegmentRules
from genserve.weights.push.stream import PushStream

HEADER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OversizedFrame:
    """A frame that is not a chunk and too large to be an honest header. Sizes are bytes."""

    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class UnknownFrame:
    """A frame of no kind that is known."""


Frame: TypeAlias = weights_pb2.PushHeader | Chunk | SegmentChunk | weights_pb2.PushEnd | OversizedFrame | UnknownFrame
Frames: TypeAlias = AsyncIterator[Frame]


def frame_parser(max_header_bytes: int | None) -> Callable[[bytes], Frame]:
    """A deserializer that builds no objects for a chunk, and none for a header above `max_header_bytes`: as objects, a
    manifest of a million tensors takes several times its bytes."""

    def parse(data: bytes) -> Frame:
        chunk = parse_chunk(data)
        if chunk is not None:
            return chunk
        if max_header_bytes is not None and len(data) > max_header_bytes and chunk_start(data) is None:
            return OversizedFrame(len(data), max_header_bytes)
        return _typed(weights_pb2.PushWeightsRequest.FromString(data))

    return parse


def _typed(message: weights_pb2.PushWeightsRequest) -> Frame:
    match message.WhichOneof("frame"):
        case "header":
            return message.header
        case "chunk":
            chunk = message.chunk
            return Chunk(chunk.offset, chunk.data, chunk.crc32c if chunk.HasField("crc32c") else None)
        case "segment":
            segment = message.segment
            crc32c = segment.crc32c if segment.HasField("crc32c") else None
            place = (segment.path, segment.segment_offset, segment.offset, segment.length)
            return SegmentChunk(*place, crc32c, ack_path=segment.taken_path)
        case "end":
            return message.end
        case None:
            return UnknownFrame()


async def read_header(frames: Frames) -> weights_pb2.PushHeader:
    """The first frame. Raises InvalidFieldError for another frame, ManifestMismatchError for a header that is too
    large, DeadlineError if none comes."""
    try:
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            first = await anext(frames, None)
    except TimeoutError:
        raise DeadlineError(f"no header arrived within {HEADER_TIMEOUT_S:g} s") from None
    if isinstance(first, OversizedFrame):
        raise ManifestMismatchError(
            f"the header has {first.size_bytes} bytes; no manifest for this checkpoint needs more than "
            f"{first.limit_bytes}"
        )
    if not isinstance(first, weights_pb2.PushHeader):
        raise InvalidFieldError.of("frame", "the first one must be a header")
    return first


async def read_chunks(frames: Frames, stream: PushStream, rules: SegmentRules) -> None:
    """Writes chunks until the end frame.

    This runs on the event loop: checksum and copy of 1 MiB take as long as passing them to a thread, and less time than
    the message of a token. `rules` say whether the stream may hand over shared memory; most streams never do.
    """
    ended, segments = False, None
    try:
        async for frame in frames:
            match frame:
                case Chunk():
                    if stream.claims:
                        await stream.wait_unclaimed(frame.offset, len(frame.data))
                    stream.write(frame.offset, frame.data, frame.crc32c)
                case SegmentChunk():
                    segments = rules.reader() if segments is None else segments
                    await segments.take(stream, frame)
                case weights_pb2.PushEnd():
                    async for _ in frames:
                        raise InvalidFieldError.of("frame", "no frame may follow the end frame")
                    ended = True
                case weights_pb2.PushHeader() | OversizedFrame():
                    raise InvalidFieldError.of("frame", "header is not allowed here")
                case UnknownFrame():
                    raise InvalidFieldError.of("frame", "an unknown frame is not allowed here")
        if segments is not None:
            await segments.finish()
    finally:
        if segments is not None:
            await segments.close()
    if ended:
        return
    raise PushTruncatedError(
        "the stream was closed without an end frame; the bytes that arrived stay staged",
        metadata={"push_id": stream.push_id},
    )
