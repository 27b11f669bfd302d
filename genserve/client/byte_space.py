"""The flat byte space of a push: tensors end to end in order of their names, cut into chunks.

Pure apart from `TensorSource.read`, which is called in a worker thread.
"""

import asyncio
import hashlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, pairwise

from genserve.client.tensors import TensorSource
from genserve.v1 import weights_pb2

Range = tuple[int, int]
"""Bytes [start, end) of the byte space."""


class ByteSpace:
    """Lays tensors out without gaps. Raises ValueError for a name that occurs twice or for no tensor at all."""

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self._sources = sorted(sources, key=lambda source: source.name)
        names = [source.name for source in self._sources]
        if not names:
            raise ValueError("there are no weights to push")
        for name, following in pairwise(names):
            if name == following:
                raise ValueError(f"{name} occurs twice")
        self._ends = list(accumulate(source.size_bytes for source in self._sources))
        self.total_bytes = self._ends[-1]

    def manifest(self, *, partial: bool) -> weights_pb2.Manifest:
        """The tensors with their places; `partial`: others of the checkpoint keep their present values."""
        tensors = [
            weights_pb2.TensorSpec(
                name=source.name,
                dtype=source.dtype,
                shape=source.shape,
                offset=end - source.size_bytes,
                length=source.size_bytes,
            )
            for source, end in zip(self._sources, self._ends, strict=True)
        ]
        return weights_pb2.Manifest(tensors=tensors, total_bytes=self.total_bytes, partial=partial)

    async def chunks(self, ranges: Sequence[Range], chunk_bytes: int) -> AsyncIterator[tuple[int, list[memoryview]]]:
        """Cuts the ranges into (offset, pieces) of at most `chunk_bytes`; a chunk may span tensors."""
        index, data = -1, memoryview(b"")
        for start, end in ranges:
            for chunk_start in range(start, end, chunk_bytes):
                position, chunk_end = chunk_start, min(chunk_start + chunk_bytes, end)
                pieces: list[memoryview] = []
                while position < chunk_end:
                    needed = bisect_right(self._ends, position)
                    if needed != index:
                        data = memoryview(b"")  # lets go of the copy before the next one is made
                        index, data = needed, await asyncio.to_thread(self._sources[needed].read)
                    tensor_end = self._ends[index]
                    tensor_start = tensor_end - len(data)
                    piece_end = min(chunk_end, tensor_end)
                    pieces.append(data[position - tensor_start : piece_end - tensor_start])
                    position = piece_end
                yield chunk_start, pieces


def manifest_digest(manifest: weights_pb2.Manifest) -> str:
    """SHA-256, in hex, of the manifest's lines; see `PushHeader.manifest_digest`."""
    digest = hashlib.sha256()
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{tensor.name}\t{tensor.dtype}\t{shape}\t{tensor.offset}\t{tensor.length}\n".encode())
    return digest.hexdigest()
