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

from genserve.client.safetensors_file import DTYPE_BYTES
from genserve.client.tensors import TensorSource
from genserve.v1 import weights_pb2

Range = tuple[int, int]
"""Bytes [start, end) of the byte space."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a push, of which a caller may have a part: (name, safetensors' dtype, shape). They lie end to end
    in order of their names."""

    tensors: Sequence[tuple[str, str, tuple[int, ...]]]

    def places(self) -> list[weights_pb2.TensorSpec]:
        """The tensors with their places."""
        specs, end = [], 0
        for name, dtype, shape in sorted(self.tensors):
            length = math.prod(shape) * DTYPE_BYTES[dtype]
            specs.append(weights_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, offset=end, length=length))
            end += length
        return specs


class ByteSpace:
    """Lays tensors out without gaps; with a `layout` that has more tensors they are a part of its.

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
        self._sources = sorted(sources, key=lambda source: source.name)
        self._starts = [places[source.name].offset for source in self._sources]
        self._ends = [places[source.name].offset + places[source.name].length for source in self._sources]
        self.total_bytes = sum(spec.length for spec in self._specs)
        self.ranges = merged(zip(self._starts, self._ends, strict=True))
        """Where the bytes that are here lie: everything, or the part."""

    def manifest(self, *, partial: bool) -> weights_pb2.Manifest:
        """All tensors with their places; `partial`: others of the checkpoint keep their present values."""
        return weights_pb2.Manifest(tensors=self._specs, total_bytes=self.total_bytes, partial=partial)

    async def chunks(self, ranges: Sequence[Range], chunk_bytes: int) -> AsyncIterator[tuple[int, list[memoryview]]]:
        """Cuts ranges, which have to lie within `self.ranges`, into (offset, pieces) of at most `chunk_bytes`; a chunk
        may span tensors."""
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
                    tensor_start = self._starts[index]
                    piece_end = min(chunk_end, self._ends[index])
                    pieces.append(data[position - tensor_start : piece_end - tensor_start])
                    position = piece_end
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
    return merged((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


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
