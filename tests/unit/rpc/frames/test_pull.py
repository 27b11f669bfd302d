"""How a version is cut into frames, and which requests for it are refused."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from genserve.errors import InvalidFieldError, WeightVersionMismatchError
from genserve.memory.arena import Arena
from genserve.rpc.frames.pull import pull_frames
from genserve.tensors.chunk_frame import parse_chunk
from genserve.tensors.manifest import Manifest
from genserve.v1 import weights_pb2
from genserve.weights.resident import ArenaBytes, ResidentVersion

MIB = 1 << 20
SIZE_BYTES = 2 * MIB + 3


@pytest.fixture
def version() -> Iterator[ResidentVersion]:
    """Version 7, of a little more than two MiB."""
    arena = Arena.allocate(SIZE_BYTES)
    arena.write(SIZE_BYTES - 3, b"end")
    yield ResidentVersion(7, Manifest.end_to_end([("w", "U8", (SIZE_BYTES,), SIZE_BYTES)]), ArenaBytes(arena))
    arena.close()


async def pulled(version: ResidentVersion, *ranges: Sequence[int], **fields: Any) -> list[tuple[int, int]]:
    """Where each chunk lies, and how long it is."""
    asked = [weights_pb2.ByteRange(start=start, end=end) for start, end in ranges]
    request = weights_pb2.PullWeightsRequest(ranges=asked, **fields)
    frames = [frame async for frame in pull_frames(request, version)]
    first, last = (weights_pb2.PullWeightsResponse.FromString(each) for each in (frames[0], frames[-1]))
    assert (first.WhichOneof("frame"), last.WhichOneof("frame")) == ("header", "end")
    assert (first.header.weight_version, first.header.manifest_digest) == (7, version.manifest.digest)
    chunks = [parse_chunk(frame) for frame in frames[1:-1]]
    return [(chunk.offset, len(chunk.data)) for chunk in chunks if chunk is not None]


async def test_a_version_comes_in_chunks_of_a_mebibyte(version: ResidentVersion) -> None:
    """Unless the client wants others; the last one is what is left."""
    assert await pulled(version) == [(0, MIB), (MIB, MIB), (2 * MIB, 3)]
    assert await pulled(version, chunk_bytes=2 * MIB) == [(0, 2 * MIB), (2 * MIB, 3)]
    assert await pulled(version, weight_version=7, chunk_bytes=64 * MIB) == [(0, SIZE_BYTES)]


async def test_the_ranges_that_are_asked_for_come_and_no_others(version: ResidentVersion) -> None:
    """In their order, up to the last byte."""
    ranges = [(SIZE_BYTES - 1, SIZE_BYTES), (5, 9)]
    assert await pulled(version, *ranges, chunk_bytes=3) == [(SIZE_BYTES - 1, 1), (5, 3), (8, 1)]


@pytest.mark.parametrize(
    ("ranges", "field"),
    [([(0, SIZE_BYTES + 1)], "ranges[0]"), ([(0, 1), (5, 5)], "ranges[1]"), ([(9, 5)], "ranges[0]")],
)
async def test_a_range_that_is_not_there_is_named(
    version: ResidentVersion, ranges: list[tuple[int, int]], field: str
) -> None:
    """Behind the end, empty, or backwards: before anything is sent."""
    with pytest.raises(InvalidFieldError) as caught:
        await pulled(version, *ranges)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.slow
async def test_a_pull_has_a_bounded_number_of_ranges(version: ResidentVersion) -> None:
    """The event loop looks at each of them."""
    ranges = [(2 * index, 2 * index + 1) for index in range(4096)]
    assert len(await pulled(version, *ranges)) == 4096
    with pytest.raises(InvalidFieldError) as caught:
        await pulled(version, *ranges, (9, 10))
    assert [violation.field for violation in caught.value.violations] == ["ranges"]


async def test_a_chunk_has_at_most_64_mebibytes(version: ResidentVersion) -> None:
    """A larger one would be refused by most clients."""
    with pytest.raises(InvalidFieldError) as caught:
        await pulled(version, chunk_bytes=64 * MIB + 1)
    assert [violation.field for violation in caught.value.violations] == ["chunk_bytes"]


@pytest.mark.parametrize("wanted", [0, 6, 8])
async def test_another_version_is_refused(version: ResidentVersion, wanted: int) -> None:
    """The error says which one is served."""
    with pytest.raises(WeightVersionMismatchError) as caught:
        await pulled(version, weight_version=wanted)
    assert caught.value.metadata == {"weight_version": "7"}
