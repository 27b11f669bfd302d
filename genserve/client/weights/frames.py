"""Frames of a push as bytes."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from genserve.memory.ring import Piece
from genserve.tensors.chunk_frame import chunk_frame as encoded_chunk
from genserve.v1 import weights_pb2

END_FRAME: Final = weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd()).SerializeToString()


def header_frame(header: weights_pb2.PushHeader) -> bytes:
    """The first frame."""
    return weights_pb2.PushWeightsRequest(header=header).SerializeToString()


def segment_frame(offset: int, piece: Piece) -> bytes:
    """The bytes of the byte space at `offset`, in shared memory."""
    segment = weights_pb2.PushSegment(
        path=piece.path,
        segment_offset=piece.start,
        offset=offset,
        length=piece.length,
        taken_path=piece.ack_path,
    )
    return weights_pb2.PushWeightsRequest(segment=segment).SerializeToString()


def chunk_frame(offset: int, pieces: Sequence[bytes | memoryview], *, checksum: bool) -> bytes:
    """A chunk of the bytes of `pieces` at `offset`, with their CRC32C if there is a fast way to compute it."""
    extend = crc32c() if checksum else None
    if extend is None:
        return encoded_chunk(offset, pieces, None)
    computed = 0
    for piece in pieces:
        computed = extend(computed, piece)
    return encoded_chunk(offset, pieces, computed)


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
