"""The flat byte space of a push: tensors end to end in order of their names, cut into chunks.

Pure apart from `TensorSource.read`, which is called in a worker thread.
"""

import asyncio
import hashlib
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from genserve.client.weights.sources import TensorSource
from genserve.tensors.dtypes import item_bytes
from genserve.v1 import weights_pb2

Range = tuple[int, int]
"""Bytes [start, end) of the byte space."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a push, of which a caller may have a part: (name, safetensors' dtype, shape). They lie end to end
    in order of their names."""

    tensors: Sequence[tuple[str, str, tuple[int, ...]]]

    def places(self) -> list[weights_pb2.TensorSpec]:
        """The tensors with their places. Raises DtypeError."""
        specs, end = [], 0
        for name, dtype, shape in sorted(self.tensors):
            length = math.prod(shape) * item_bytes(name, dtype)
            specs.append(weights_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, offset=end, length=length))
            end += length
        return specs


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [start, end) of the byte space are those of `source.read()` from `source_start` on."""

    start: int
    end: int
    source: TensorSource
    source_start: int


class ByteSpace:
    """Lays tensors out without gaps; with a `layout` that has more tensors they are a part of its. Of a tensor that
    several ranks have together a part is here.

    Raises ValueError for a name that occurs twice, for no tensor at all, and for one that is not in the layout.
    """

    def __init__(self, sources: Sequence[TensorSource], layout: Layout | None = None) -> None:
        names = sorted(source.name for source in sources)
        if not names:
            raise ValueError("there are no weights to push")
        for name, following in pairwise(names):
            if name == following:
                raise ValueError(f"{name} occurs twice")
        own = Layout([(source.name, source.dtype, source.shape) for source in sources])
        self._specs = (layout or own).places()
        places = {spec.name: spec for spec in self._specs}
        for source in sources:
            spec = places.get(source.name)
            if spec is None:
                raise ValueError(f"{source.name} is not in the layout")
            if (spec.dtype, tuple(spec.shape)) != (source.dtype, source.shape):
                raise ValueError(
                    f"{source.name} is {source.dtype}{list(source.shape)}, "
                    f"the layout has {spec.dtype}{list(spec.shape)}"
                )
        self._pieces: list[_Piece] = []
        for source in sorted(sources, key=lambda source: source.name):
            tensor_start, source_start = places[source.name].offset, 0
            for start, end in source.ranges:
                self._pieces.append(_Piece(tensor_start + start, tensor_start + end, source, source_start))
                source_start += end - start
        self._ends = [piece.end for piece in self._pieces]
        self.total_bytes = sum(spec.length for spec in self._specs)
        self.ranges = merged((piece.start, piece.end) for piece in self._pieces)
        """Where the bytes that are here lie: everything, or the part."""

    def manifest(self, *, partial: bool) -> weights_pb2.Manifest:
        """All tensors with their places; `partial`: others of the checkpoint keep their present values."""
        return weights_pb2.Manifest(tensors=self._specs, total_bytes=self.total_bytes, partial=partial)

    def names(self, ranges: Sequence[Range]) -> list[str]:
        """The tensors that have bytes in `ranges`, which are in order and without overlaps."""
        ends = [end for _, end in ranges]
        found = []
        for spec in self._specs:
            index = bisect_right(ends, spec.offset)
            if index < len(ranges) and max(ranges[index][0], spec.offset) < spec.offset + spec.length:
                found.append(spec.name)
        return found

    async def chunks(self, ranges: Sequence[Range], chunk_bytes: int) -> AsyncIterator[tuple[int, list[memoryview]]]:
        """Cuts ranges, which have to lie within `self.ranges`, into (offset, pieces) of at most `chunk_bytes`; a chunk
        may span tensors."""
        source, data = None, memoryview(b"")
        for start, end in ranges:
            for chunk_start in range(start, end, chunk_bytes):
                position, chunk_end = chunk_start, min(chunk_start + chunk_bytes, end)
                pieces: list[memoryview] = []
                while position < chunk_end:
                    piece = self._pieces[bisect_right(self._ends, position)]
                    if piece.source is not source:
                        data = memoryview(b"")  # lets go of the copy before the next one is made
                        source = piece.source
                        data = await asyncio.to_thread(source.read) if source.copies else source.read()
                    first = piece.source_start + position - piece.start
                    num_bytes = min(chunk_end, piece.end) - position
                    pieces.append(data[first : first + num_bytes])
                    position += num_bytes
                yield chunk_start, pieces


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, those that touch as one, those without a byte left out."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined


def common(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """The bytes that are in both; each is in order and without overlaps."""
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        (a, b), (c, d) = one[i], other[j]
        if max(a, c) < min(b, d):
            shared.append((max(a, c), min(b, d)))
        if b < d:
            i += 1
        else:
            j += 1
    return merged(shared)


def split(ranges: Sequence[Range], num_parts: int) -> list[list[Range]]:
    """The ranges in `num_parts` parts of about the same number of bytes, some empty if there are few."""
    total_bytes = sum(end - start for start, end in ranges)
    cuts = [total_bytes * part // num_parts for part in range(num_parts + 1)]
    parts: list[list[Range]] = []
    for low, high in pairwise(cuts):
        part, position = [], 0
        for start, end in ranges:
            first, last = max(start, start + low - position), min(end, start + high - position)
            if first < last:
                part.append((first, last))
            position += end - start
        parts.append(part)
    return parts


def manifest_digest(manifest: weights_pb2.Manifest) -> str:
    """SHA-256, in hex, of the manifest's lines; see `PushHeader.manifest_digest`."""
    digest = hashlib.sha256()
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{tensor.name}\t{tensor.dtype}\t{shape}\t{tensor.offset}\t{tensor.length}\n".encode())
    return digest.hexdigest()
