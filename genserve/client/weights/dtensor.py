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


@dataclass(frozen=True, slots=True)
class Cut:
    """A block of a DTensor that is a tensor of its own, such as one expert of those of a layer.

    `starts` and `lengths` are those of the block, for each dimension of the DTensor; `dims` are the dimensions that the
    block keeps, in its own order. The others have length 1.
    """

    tensor: Any
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of_view(cls, tensor: Any, whole: Any, view: Any) -> "Cut | None":
        """What `view` is of `whole`, a contiguous tensor like the DTensor; None if it is no block."""
        strides, shape, rest = whole.stride(), whole.shape, view.storage_offset()
        starts = []
        for stride in strides:
            starts.append(rest // stride)
            rest %= stride
        lengths, dims = [1] * len(shape), list[int]()
        for size, stride in zip(view.shape, view.stride(), strict=True):
            fits = (d for d in range(len(shape)) if (strides[d], d in dims) == (stride, False))
            dim = next((d for d in fits if starts[d] + size <= shape[d]), None)
            if dim is None:
                return None
            dims.append(dim)
            lengths[dim] = size
        return cls(tensor, tuple(starts), tuple(lengths), tuple(dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(self.lengths[dim] for dim in self.dims)

    @property
    def dtype(self) -> Any:
        """torch's type of its elements."""
        return self.tensor.dtype


def shared_out(name: str, tensor: Any) -> tuple[Any, Share]:
    """This rank's part of a DTensor, or of what is cut out of one, as a plain tensor, and its share. Both have the same
    bytes.

    If several ranks hold the same part (Replicate), the first of them has the share. Raises ValueError if the part is
    not a block of the tensor: pending sums (Partial), and blocks of blocks.
    """
    whole = tensor.tensor if isinstance(tensor, Cut) else tensor
    mesh, placements = whole.device_mesh, whole.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: {placements} is a pending sum; redistribute it on every rank first")
    ranks, local = tuple(sorted(mesh.mesh.flatten().tolist())), whole.detach().to_local()
    coordinate = mesh.get_coordinate()
    sends = coordinate is not None and not any(
        position for position, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    if not sends or local.numel() == 0:
        return local, Share((), ranks, mesh.get_rank())
    chunks = whole.__create_chunk_list__()  # as torch.distributed.checkpoint finds the place of each chunk
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"{name}: what {placements} leaves here is no block; redistribute it on every rank first")
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    if isinstance(tensor, Cut):
        local, offsets, sizes = _common(tensor, local, offsets)
    if local.numel() == 0:
        return local, Share((), ranks, mesh.get_rank())
    ranges = block_ranges(tuple(tensor.shape), offsets, sizes, local.element_size())
    return local, Share(tuple(ranges), ranks, mesh.get_rank())


def _common(cut: Cut, local: Any, offsets: Sequence[int]) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """What a cut and this rank's block at `offsets` have in common: the elements, and their place in the cut."""
    begins = [max(pair) for pair in zip(cut.starts, offsets, strict=True)]
    for dim, (start, length) in enumerate(zip(cut.starts, cut.lengths, strict=True)):
        end = min(start + length, offsets[dim] + local.shape[dim])
        if end <= begins[dim]:
            return local.new_empty(0), (), ()
        local = local.narrow(dim, begins[dim] - offsets[dim], end - begins[dim])
        offsets = (*offsets[:dim], begins[dim], *offsets[dim + 1 :])
    dropped = [dim for dim in range(len(cut.starts)) if dim not in cut.dims]
    local = local.permute(*cut.dims, *dropped)[(..., *(0 for _ in dropped))]
    return local, tuple(begins[dim] - cut.starts[dim] for dim in cut.dims), tuple(local.shape)


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
