"""Frames of a push as bytes.

A chunk is written by hand around the tensors' memory: one copy instead of the three that building and serialising a
protobuf message takes.
A test holds the bytes to those of `PushWeightsRequest.SerializeToString()`.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from genserve.v1 import weights_pb2

END_FRAME: Final = weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd()).SerializeToString()

# Tags, (field number << 3) | wire type.
_FRAME_CHUNK: Final = b"\x12"
_CHUNK_OFFSET: Final = b"\x08"
_CHUNK_DATA: Final = b"\x12"
_CHUNK_CRC32C: Final = b"\x1d"


def header_frame(header: weights_pb2.PushHeader) -> bytes:
    """The first frame."""
    return weights_pb2.PushWeightsRequest(header=header).SerializeToString()


def chunk_frame(offset: int, pieces: Sequence[bytes | memoryview], *, checksum: bool) -> bytes:
    """A chunk of the bytes of `pieces` at `offset`, with their CRC32C if there is a fast way to compute it."""
    extend = crc32c() if checksum else None
    tail = b""
    if extend is not None:
        computed = 0
        for piece in pieces:
            computed = extend(computed, piece)
        tail = _CHUNK_CRC32C + computed.to_bytes(4, "little")
    size_bytes = sum(map(len, pieces))
    head = (_CHUNK_OFFSET + _varint(offset) if offset > 0 else b"") + _CHUNK_DATA + _varint(size_bytes)
    return b"".join((_FRAME_CHUNK, _varint(len(head) + size_bytes + len(tail)), head, *pieces, tail))


@cache
def crc32c() -> Callable[[int, bytes | memoryview], int] | None:
    """google_crc32c's in C, which goes on from the checksum of the bytes before (0 at first); without it chunks have no
    checksum, which is said once."""
    try:
        google_crc32c = import_module("google_crc32c")
    except ImportError:
        google_crc32c = None
    if google_crc32c is None or google_crc32c.implementation != "c":
        warnings.warn("google-crc32c is not installed: a push relies on the transport's checksums", stacklevel=4)
        return None
    extend: Callable[[int, Any], int] = google_crc32c.extend
    try:
        as_array = import_module("numpy").frombuffer
    except ImportError:
        return lambda before, data: extend(before, bytes(data))
    # It takes bytes and no memoryview, but an array over one.
    return lambda before, data: extend(before, data if isinstance(data, bytes) else as_array(data, "uint8"))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
