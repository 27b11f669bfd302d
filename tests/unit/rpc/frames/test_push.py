"""What a frame of a push is, and how long the first one may take."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import DecodeError, Message

from genserve.errors import DeadlineError, InvalidFieldError, ManifestMismatchError
from genserve.memory.segment import SegmentChunk
from genserve.rpc.frames import push
from genserve.rpc.frames.push import Frame, OversizedFrame, UnknownFrame, frame_parser, read_header
from genserve.tensors.chunk_frame import Chunk
from genserve.v1 import weights_pb2
from tests.support.patience import STEP_S


def frame(**kind: Message) -> bytes:
    """A frame on the wire."""
    return weights_pb2.PushWeightsRequest(**kind).SerializeToString()  # type: ignore[arg-type]


HEADER = weights_pb2.PushHeader(push_id="p" * 100)


def test_every_kind_of_frame_is_told_apart() -> None:
    """With and without a checksum: 0 is one."""
    parse = frame_parser(None)
    segment = {"path": "/m", "segment_offset": 1, "offset": 2, "length": 3}
    assert parse(frame(header=HEADER)) == HEADER
    assert parse(frame(end=weights_pb2.PushEnd())) == weights_pb2.PushEnd()
    assert parse(frame(segment=weights_pb2.PushSegment(**segment))) == SegmentChunk("/m", 1, 2, 3, None)
    checked = weights_pb2.PushSegment(**segment, crc32c=0, taken_path="/p")
    assert parse(frame(segment=checked)) == SegmentChunk("/m", 1, 2, 3, 0, "/p")
    assert parse(frame(chunk=weights_pb2.PushChunk(offset=5, data=b"abc"))) == Chunk(5, b"abc", None)
    assert isinstance(parse(b""), UnknownFrame)
    with pytest.raises(DecodeError):
        parse(b"\xff")


@pytest.mark.parametrize("fields", [{}, {"crc32c": 0}, {"crc32c": 9}])
def test_a_chunk_with_a_field_that_is_not_known_is_a_chunk(fields: dict[str, int]) -> None:
    """protobuf's own parser reads it, as clients may be newer than the daemon."""
    unknown = b"\x78\x01"  # field 15
    data = weights_pb2.PushChunk(offset=5, data=b"abc", **fields).SerializeToString() + unknown
    assert frame_parser(None)(b"\x12%c%b" % (len(data), data)) == Chunk(5, b"abc", fields.get("crc32c"))


def test_a_header_above_the_limit_is_not_parsed() -> None:
    """One that just fits is; a chunk may be as large as it likes."""
    data = frame(header=HEADER)
    assert frame_parser(len(data))(data) == HEADER
    assert frame_parser(len(data) - 1)(data) == OversizedFrame(len(data), len(data) - 1)
    chunk = frame(chunk=weights_pb2.PushChunk(data=b"x" * 100))
    assert frame_parser(1)(chunk) == Chunk(0, b"x" * 100, None)
    unknown = weights_pb2.PushChunk(data=b"x" * 100).SerializeToString() + b"\x78\x01"
    assert frame_parser(1)(b"\x12%c%b" % (len(unknown), unknown)) == Chunk(0, b"x" * 100, None)


async def frames(*given: Frame) -> AsyncIterator[Frame]:
    """These."""
    for each in given:
        yield each


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ([], InvalidFieldError),
        ([weights_pb2.PushEnd()], InvalidFieldError),
        ([Chunk(0, b"", None)], InvalidFieldError),
        ([OversizedFrame(9, 5)], ManifestMismatchError),
    ],
)
async def test_a_push_begins_with_a_header(first: list[Frame], error: type[Exception]) -> None:
    """Nothing else says what is pushed."""
    assert await read_header(frames(HEADER, weights_pb2.PushEnd())) == HEADER
    with pytest.raises(error):
        await read_header(frames(*first))


async def test_a_client_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gone."""
    assert push.HEADER_TIMEOUT_S >= 10, "an honest client may be slow"
    monkeypatch.setattr(push, "HEADER_TIMEOUT_S", 0.01)

    async def silent() -> AsyncIterator[Frame]:
        await asyncio.Event().wait()
        yield HEADER

    with pytest.raises(DeadlineError, match="no header arrived"):
        await asyncio.wait_for(read_header(silent()), STEP_S)
