"""A chunk of weights, read directly from the bytes of its frame or written to them: protobuf objects would copy its
data.

Tests compare both directions with protobuf's classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from genserve.tensors.varint import read_varint, to_varint

# Tags: field number << 3 | wire type.
_FRAME_CHUNK = 0x12
_CHUNK_OFFSET = 0x08
_CHUNK_DATA = 0x12
_CHUNK_CRC32C = 0x1D
_LAST_SHIFT = 56  # the last byte of the longest number that `read_varint` reads


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the byte space of a push, at `offset` (bytes)."""

    offset: int
    data: bytes | memoryview
    crc32c: int | None


def chunk_start(frame: bytes) -> int | None:
    """Where the PushChunk begins in a PushWeightsRequest or PullWeightsResponse that contains only a chunk; None for
    any other."""
    if not frame or frame[0] != _FRAME_CHUNK:
        return None
    try:
        length, position = read_varint(frame, 1)
    except (IndexError, ValueError):
        return None
    return position if position + length == len(frame) else None


def parse_chunk(frame: bytes) -> Chunk | None:
    """The chunk, whose data is a view into `frame`. None if protobuf's own parser must decide: another frame, unknown
    fields, or an invalid message."""
    offset, data_start, data_end, crc32c = 0, 0, 0, None
    size, position, is_inside = len(frame), 0, False
    try:
        # Fields may come in any order and repeat: the last one counts.
        while position < size or not is_inside:
            tag = frame[position]
            position += 1
            if is_inside and tag == _CHUNK_CRC32C:
                crc32c = int.from_bytes(frame[position : position + 4], "little")
                position += 4
                continue
            # As `read_varint`, whose calls would take longer than all the rest.
            number = shift = 0
            while (byte := frame[position]) > 0x7F:
                number |= (byte & 0x7F) << shift
                position, shift = position + 1, shift + 7
                if shift > _LAST_SHIFT:
                    return None
            number |= byte << shift
            position += 1
            if not is_inside:
                if tag != _FRAME_CHUNK or position + number != size:
                    return None
                is_inside = True
            elif tag == _CHUNK_OFFSET:
                offset = number
            elif tag == _CHUNK_DATA:
                data_start = position
                data_end = position = position + number
            else:
                return None
    except IndexError:
        return None
    if position != size:
        return None  # the last field is cut off
    return Chunk(offset, memoryview(frame)[data_start:data_end], crc32c)


def chunk_frame(offset: int, pieces: Sequence[bytes | memoryview], crc32c: int | None) -> bytes:
    """The frame of the bytes of `pieces`, which are copied once; protobuf's classes would copy them three times.
    `crc32c` None = without a checksum."""
    size_bytes = sum(map(len, pieces))
    head = b"%c%b" % (_CHUNK_OFFSET, to_varint(offset)) if offset > 0 else b""
    head += b"%c%b" % (_CHUNK_DATA, to_varint(size_bytes))
    tail = b"" if crc32c is None else b"%c%b" % (_CHUNK_CRC32C, crc32c.to_bytes(4, "little"))
    length = to_varint(len(head) + size_bytes + len(tail))
    return b"".join((b"%c%b" % (_FRAME_CHUNK, length), head, *pieces, tail))
