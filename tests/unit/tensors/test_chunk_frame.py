"""The parser written by hand reads what protobuf's reads."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from genserve.memory.segment import SegmentChunk
from genserve.rpc.frames.push import Frame as PushFrame
from genserve.rpc.frames.push import UnknownFrame, frame_parser
from genserve.tensors.chunk_frame import Chunk, chunk_start, parse_chunk
from genserve.v1 import weights_pb2

Frame = weights_pb2.PushWeightsRequest


def varint(number: int, padding: int = 0) -> bytes:
    """`number` with `padding` more bytes than it needs."""
    encoded = bytearray()
    while number > 0x7F or padding > 0:
        padding -= number <= 0x7F
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def by_protobuf(frame: bytes) -> PushFrame | None:
    """What protobuf says: None for what is no message."""
    try:
        message = Frame.FromString(frame)
    except DecodeError:
        return None
    kind = message.WhichOneof("frame")
    if kind is None:
        return UnknownFrame()
    found = getattr(message, kind)
    if kind not in ("chunk", "segment"):
        return found
    crc32c = found.crc32c if found.HasField("crc32c") else None
    if kind == "chunk":
        return Chunk(found.offset, found.data, crc32c)
    return SegmentChunk(found.path, found.segment_offset, found.offset, found.length, crc32c, found.taken_path)


def by_us(frame: bytes) -> PushFrame | None:
    """What the server's parser says."""
    try:
        return frame_parser(None)(frame)
    except DecodeError:
        return None


numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
fields = st.one_of(
    st.builds(lambda number, padding: b"\x08" + varint(number, padding), numbers, st.integers(0, 4)),
    st.builds(lambda data: b"\x12" + varint(len(data)) + data, st.binary(max_size=200)),
    st.builds(lambda crc: b"\x1d" + crc, st.binary(min_size=4, max_size=4)),
    st.builds(lambda number: b"\x20" + varint(number), numbers),  # unknown
    st.builds(lambda data: b"\x2a" + varint(len(data)) + data, st.binary(max_size=9)),
    st.builds(lambda number: b"\x10" + varint(number), numbers),  # known, of another type
)
bodies = st.lists(fields, max_size=6).map(b"".join)
frames = st.builds(lambda body, tag, padding: tag + varint(len(body), padding) + body, bodies,
                   st.sampled_from([b"\x12", b"\x12", b"\x0a", b"\x1a", b"\x22"]), st.integers(0, 3))  # fmt: skip


@pytest.mark.slow
@given(st.lists(frames, max_size=3).map(b"".join))
@example(b"\x12\x00")
@example(b"\x12\x02\x08\x80")
@example(b"\x12\x05\x1d\x01\x02\x03\x04")
def test_messages_are_read_as_protobuf_reads_them(frame: bytes) -> None:
    """Fields in any order, repeated, unknown, of a wrong type; several frames in one message."""
    assert by_us(frame) == by_protobuf(frame)


@given(frames, st.data())
def test_damaged_messages_are_read_as_protobuf_reads_them(frame: bytes, data: st.DataObject) -> None:
    """Cut off or with some bytes changed: the same message, or the same refusal."""
    damaged = bytearray(frame[: data.draw(st.integers(0, len(frame)))])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assert by_us(bytes(damaged)) == by_protobuf(bytes(damaged))


@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_read_as_protobuf_reads_them(frame: bytes) -> None:
    """Also those that nobody meant to be a message."""
    assert by_us(frame) == by_protobuf(frame)
    assert by_us(b"\x12" + varint(len(frame)) + frame) == by_protobuf(b"\x12" + varint(len(frame)) + frame)


@given(offset=st.integers(0, 2**63 - 1), data=st.binary(max_size=300), crc32c=st.none() | st.integers(0, 2**32 - 1))
def test_what_generated_clients_send_needs_no_protobuf(offset: int, data: bytes, crc32c: int | None) -> None:
    """The fast way is taken, and the data is not copied."""
    frame = Frame(chunk=weights_pb2.PushChunk(offset=offset, data=data, crc32c=crc32c)).SerializeToString()
    chunk = parse_chunk(frame)
    assert chunk == Chunk(offset, data, crc32c)
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is frame
    assert chunk_start(frame) == len(frame) - Frame.FromString(frame).chunk.ByteSize()
