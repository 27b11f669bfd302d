"""Which bytes of a tensor this rank sends, when several ranks of a trainer have it together.

A DTensor is known by what it can do, so torch is not imported; nothing here communicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from typing import Any, Final

MAX_PIECES: Final = 8192
"""Most pieces that one rank sends of a push. A piece is a frame of its own, and until its neighbours have come a hole
in what the daemon has, which holds some ten thousands of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several ranks sends of a tensor."""

    ranges: tuple[tuple[int, int], ...]
    """Bytes [start, end) of the whole tensor, in order; none where another rank sends what this one has."""
    ranks: tuple[int, ...]
    """Every rank that has a share, in order, as torch.distributed counts them."""
    rank: int
    """This one."""

    def of_plain(self, size_bytes: int) -> "Share":
        """That of a tensor which all of the same ranks have whole: the first one sends it."""
        return Share(((0, size_bytes),) if self.rank == self.ranks[0] else (), self.ranks, self.rank)


def shared_out(name: str, tensor: Any) -> tuple[Any, Share]:
    """What a rank has of a DTensor, as a plain tensor, and its share; the bytes of the one are those of the other.

    Of what several ranks have alike (Replicate) the first of them has the share. Raises ValueError for what is no block
    of the tensor: sums that are still to be computed (Partial), and blocks of blocks.
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
    chunks = tensor.__create_chunk_list__()  # as torch.distributed.checkpoint asks what lies where
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"{name}: what {placements} leaves here is no block; redistribute it on every rank first")
    ranges = block_ranges(tuple(tensor.shape), chunks[0].offsets, chunks[0].sizes, local.element_size())
    return local, Share(tuple(ranges), ranks, mesh.get_rank())


def block_ranges(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> Iterator[tuple[int, int]]:
    """Where the block of `sizes` at `offsets` lies in a row-major tensor of `shape`: ranges of bytes of equal length,
    in order, as few as can be. No size is 0."""
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
