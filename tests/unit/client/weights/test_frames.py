"""Frames and the byte space they are cut from."""

import sys
import warnings

import numpy
import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from genserve.client.weights import upload
from genserve.client.weights.layout import ByteSpace, computes_checksums
from genserve.client.weights.sources import tensor_sources
from genserve.v1 import weights_pb2


@given(offset=st.integers(0, 2**63), pieces=st.lists(st.binary(max_size=300), max_size=4), checksum=st.booleans())
def test_a_chunk_is_encoded_as_protobuf_does(offset: int, pieces: list[bytes], checksum: bool) -> None:
    """The frame written by hand is the frame that the generated classes write."""
    data = b"".join(pieces)
    chunk = weights_pb2.PushChunk(offset=offset, data=data, crc32c=crc32c(data) if checksum else None)
    frame = upload.chunk_frame(offset, [memoryview(piece) for piece in pieces], checksum=checksum)
    assert weights_pb2.PushWeightsRequest.FromString(frame) == weights_pb2.PushWeightsRequest(chunk=chunk)


def test_without_google_crc32c_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks then have no checksum; a warning tells, but not a thousand times."""
    computes_checksums.cache_clear()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        frame, *_ = [upload.chunk_frame(0, [memoryview(b"x")], checksum=True) for _ in range(3)]
    computes_checksums.cache_clear()
    assert len(warned) == 1
    assert "google-crc32c" in str(warned[0].message)
    assert not weights_pb2.PushWeightsRequest.FromString(frame).chunk.HasField("crc32c")


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    chunk_bytes=st.integers(1, 30),
    cut=st.tuples(st.integers(0, 120), st.integers(0, 120)),
)
async def test_chunks_cover_exactly_the_ranges(sizes: list[int], chunk_bytes: int, cut: tuple[int, int]) -> None:
    """Whatever the sizes, empty tensors included: every byte of the ranges once, in its place, none beside."""
    arrays = {f"{index}": numpy.full(size, index, dtype="uint8") for index, size in enumerate(sizes)}
    space = ByteSpace(tensor_sources(arrays))
    whole = b"".join(array.tobytes() for array in arrays.values())
    start, end = (min(bound, len(whole)) for bound in sorted(cut))
    ranges = [(start, end), (end, len(whole))]
    received = b""
    async for offset, pieces in space.chunks(ranges, chunk_bytes):
        assert offset == start + len(received)
        assert 0 < sum(map(len, pieces)) <= chunk_bytes
        received += b"".join(pieces)
    assert received == whole[start:]


def test_a_name_that_occurs_twice_is_refused() -> None:
    """As when two shards have the same tensor."""
    (source,) = tensor_sources({"w": numpy.zeros(1)})
    with pytest.raises(ValueError, match=r"\bw\b"):
        ByteSpace([source, source])
