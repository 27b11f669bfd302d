"""The frames of a pull: the resident version, cut into chunks."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from genserve.errors import InvalidFieldError, WeightVersionMismatchError
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import chunk_frame
from genserve.v1 import weights_pb2
from genserve.weights.resident import ResidentVersion
from genserve.wire import manifest_message

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 64 << 20


async def pull_frames(request: weights_pb2.PullWeightsRequest, version: ResidentVersion) -> AsyncGenerator[bytes, None]:
    """Header, chunks and end frame as bytes. Raises InvalidFieldError, WeightVersionMismatchError if another version is
    requested or this one was freed meanwhile, and NotResidentError if its bytes are unknown."""
    if request.HasField("weight_version") and request.weight_version != version.weight_version:
        raise WeightVersionMismatchError(
            f"version {version.weight_version} is served, not {request.weight_version}",
            metadata={"weight_version": str(version.weight_version)},
        )
    chunk_bytes = request.chunk_bytes or DEFAULT_CHUNK_BYTES
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise InvalidFieldError.of("chunk_bytes", f"must be at most {MAX_CHUNK_BYTES}, is {chunk_bytes}")
    ranges = _ranges(request.ranges, version.manifest.total_bytes)
    # In a thread: a manifest of a hundred thousand tensors would delay every token stream.
    yield await asyncio.to_thread(_header, version)
    for start, end in ranges:
        for position in range(start, end, chunk_bytes):
            # In a thread: a checkpoint may have to be read from a disk.
            yield await asyncio.to_thread(_chunk, version, position, min(position + chunk_bytes, end))
    yield weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd()).SerializeToString()


def _header(version: ResidentVersion) -> bytes:
    header = weights_pb2.PushHeader(
        weight_version=version.weight_version,
        manifest=manifest_message(version.manifest),
        manifest_digest=version.manifest.digest,
        push_id=version.push_id,
        content_digest=version.content_digest,
    )
    return weights_pb2.PullWeightsResponse(header=header).SerializeToString()


def _chunk(version: ResidentVersion, start: int, end: int) -> bytes:
    data = version.view(start, end)
    return chunk_frame(start, [data], crc32c_of(data))


def _ranges(asked: Sequence[weights_pb2.ByteRange], total_bytes: int) -> list[tuple[int, int]]:
    for index, each in enumerate(asked):
        if not each.start < each.end <= total_bytes:
            raise InvalidFieldError.of(
                f"ranges[{index}]", f"[{each.start}, {each.end}) is not within the {total_bytes} bytes"
            )
    return [(each.start, each.end) for each in asked] or [(0, total_bytes)]
