"""Which bytes of a tensor this rank sends, if several ranks of a trainer hold it together.

A DTensor is recognised by its methods, so torch is not imported. Nothing here communicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from typing import Any, Final

MAX_PIECES: Final = 8192
"""The limit of pieces that one rank sends of a push. Each piece is a frame, and until its neighbours arrive, a hole in
the daemon's ranges, which are limited to some ten thousand."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a tensor that one of several ranks sends."""

    ranges: tuple[tuple[int, int], ...]
    """Bytes [start, end) of the whole tensor, in order; empty if another rank sends the same bytes."""
    ranks: tuple[int, ...]
    """All ranks that have a share, in order, as torch.distributed numbers them."""
    rank: int
    """This rank."""

    def of_plain(self, size_bytes: int) -> "Share":
        """The share of a tensor that all of these ranks hold completely: the first rank sends it."""
        return Share(((0, size_bytes),) if self.rank == self.ranks[0] else (), self.ranks, self.rank)


def shared_out(name: str, tensor: Any) -> tuple[Any, Share]:
    """This rank's part of a DTensor as a plain tensor, and its share. Both have the same bytes.

    If several ranks hold the same part (Replicate), the first of them has the share. Raises ValueError if the part is
    not a block of the tensor: pending sums (Partial), and blocks of blocks.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: {placements} is a pending sum; redistribute it on every rank first")
    ranks, local = tuple(sorted(mesh.mesh.flatten().tolist())), tensor.detach().to_local()
    coordinate = mesh.get_coordinate()
    sends = coordinate is not None and not any(
        position for position, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    if not sends or local.numel() == 0:
        return local, Share((), ranks, mesh.get_rank())
    chunks = tensor.__create_chunk_list__()  # as torch.distributed.checkpoint finds the place of each chunk
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"{name}: what {placements} leaves here is no block; redistribute it on every rank first")
    ranges = block_ranges(tuple(tensor.shape), chunks[0].offsets, chunks[0].sizes, local.element_size())
    return local, Share(tuple(ranges), ranks, mesh.get_rank())


def block_ranges(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> Iterator[tuple[int, int]]:
    """The place of the block of `sizes` at `offsets` in a row-major tensor of `shape`: ranges of bytes of equal length,
    in order, as few as possible. No size is 0."""
    cut = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=None)
    if cut is None:
        yield 0, item_bytes * math.prod(shape)
        return
    strides = [item_bytes * math.prod(shape[dim + 1 :]) for dim in range(cut + 1)]
    length = sizes[cut] * strides[cut]
    outer = (range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut], strict=True))
    for index in product(*outer):
        start = sum(map(mul, (*index, offsets[cut]), strides))
        yield start, start + length
