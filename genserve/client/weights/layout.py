"""The flat byte space of a push: tensors end to end in order of their names, cut into chunks, and whether
chunks have checksums.

Pure apart from `TensorSource.read`, which is called in a worker thread, and from one warning.
"""

import asyncio
import warnings
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from genserve.client.weights.sources import TensorSource
from genserve.extras import pip_install
from genserve.tensors.checksum import is_fast
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range, merged


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [start, end) of the byte space are those of `source.read()` from `source_start` on."""

    start: int
    end: int
    source: TensorSource
    source_start: int


class ByteSpace:
    """Lays tensors out without gaps; with a `layout`, which may have more tensors, as they lie there. Of a tensor that
    several ranks have together a part is here.

    Raises ValueError for a name that occurs twice, for no tensor at all, and for a tensor that is not in the layout.
    """

    def __init__(self, sources: Sequence[TensorSource], layout: Manifest | None = None) -> None:
        names = sorted(source.name for source in sources)
        if not names:
            raise ValueError("there are no weights to push")
        for name, following in pairwise(names):
            if name == following:
                raise ValueError(f"{name} occurs twice")
        if layout is None:
            layout = Manifest.end_to_end((each.name, each.dtype, each.shape, each.size_bytes) for each in sources)
        self._manifest = layout
        places = {spec.name: spec for spec in layout.tensors}
        for source in sources:
            spec = places.get(source.name)
            if spec is None:
                raise ValueError(f"{source.name} is not in the layout: leave it out (of tied tensors one is in it)")
            if (spec.dtype, tuple(spec.shape)) != (source.dtype, source.shape):
                raise ValueError(
                    f"{source.name} is {source.dtype}{list(source.shape)}, "
                    f"the layout has {spec.dtype}{list(spec.shape)}, and several callers send what it has"
                )
        self._pieces: list[_Piece] = []
        for source in sorted(sources, key=lambda source: source.name):
            tensor_start, source_start = places[source.name].offset, 0
            for start, end in source.ranges:
                self._pieces.append(_Piece(tensor_start + start, tensor_start + end, source, source_start))
                source_start += end - start
        self._ends = [piece.end for piece in self._pieces]
        self.total_bytes = layout.total_bytes
        self.ranges = merged((piece.start, piece.end) for piece in self._pieces)
        """The place of the bytes held here: everything, or a part."""

    def manifest(self, *, partial: bool) -> Manifest:
        """All tensors with their places. `partial`: the checkpoint's other tensors keep their present values."""
        return replace(self._manifest, partial=partial)

    def names(self, ranges: Sequence[Range]) -> list[str]:
        """The tensors that have bytes in `ranges`, which are in order and without overlaps."""
        ends = [end for _, end in ranges]
        found = []
        for spec in self._manifest.tensors:
            index = bisect_right(ends, spec.offset)
            if index < len(ranges) and max(ranges[index][0], spec.offset) < spec.offset + spec.length:
                found.append(spec.name)
        return found

    async def chunks(self, ranges: Sequence[Range], chunk_bytes: int) -> AsyncIterator[tuple[int, list[memoryview]]]:
        """Cuts ranges, which must be within `self.ranges`, into (offset, pieces) of at most `chunk_bytes`. A chunk may
        contain bytes of several tensors."""
        source, data = None, memoryview(b"")
        for start, end in ranges:
            for chunk_start in range(start, end, chunk_bytes):
                position, chunk_end = chunk_start, min(chunk_start + chunk_bytes, end)
                pieces: list[memoryview] = []
                while position < chunk_end:
                    piece = self._pieces[bisect_right(self._ends, position)]
                    if piece.source is not source:
                        data = memoryview(b"")  # frees the copy before the next one is made
                        source = piece.source
                        data = await asyncio.to_thread(source.read) if source.copies else source.read()
                    first = piece.source_start + position - piece.start
                    num_bytes = min(chunk_end, piece.end) - position
                    pieces.append(data[first : first + num_bytes])
                    position += num_bytes
                yield chunk_start, pieces


@cache
def computes_checksums() -> bool:
    """Whether checksums cost little here; where they do not a warning says so, once."""
    if not is_fast():
        warnings.warn(
            "google-crc32c is not installed, or not its build in C: a push relies on the transport's checksums "
            f"({pip_install('push')})",
            stacklevel=4,
        )
    return is_fast()
