"""Frames of a push as bytes."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Final

from genserve.tensors.checksum import crc32c_of, is_fast
from genserve.tensors.chunk_frame import chunk_frame as encoded_chunk
from genserve.v1 import weights_pb2

END_FRAME: Final = weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd()).SerializeToString()


def header_frame(header: weights_pb2.PushHeader) -> bytes:
    """The first frame."""
    return weights_pb2.PushWeightsRequest(header=header).SerializeToString()


def chunk_frame(offset: int, pieces: Sequence[bytes | memoryview], *, checksum: bool) -> bytes:
    """A chunk of the bytes of `pieces` at `offset`, with their CRC32C if there is a fast way to compute it."""
    if not (checksum and computes_checksums()):
        return encoded_chunk(offset, pieces, None)
    computed = 0
    for piece in pieces:
        computed = crc32c_of(piece, computed)
    return encoded_chunk(offset, pieces, computed)


@cache
def computes_checksums() -> bool:
    """Whether checksums cost little here; where they do not a warning says so, once."""
    if not is_fast():
        warnings.warn(
            "google-crc32c is not installed, or not its build in C: a push relies on the transport's checksums "
            '(pip install "genserve[push]")',
            stacklevel=4,
        )
    return is_fast()
