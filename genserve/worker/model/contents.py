"""The contents of tensors: where they lie, and their digests."""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch

_BLOCK_BYTES: Final = 4 << 20


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the contents."""
    found = hashlib.sha256()
    for block in blocks(tensor):
        found.update(block)
    return found.hexdigest()


def blocks(tensor: torch.Tensor) -> Iterator[Any]:
    """The contents, as buffers of at most a few MiB in the CPU's memory, in order."""
    tensor = tensor.detach()
    if tensor.nbytes <= _BLOCK_BYTES:
        yield tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    elif tensor.is_contiguous():
        flat, size = tensor.view(-1), _BLOCK_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), size):
            yield from blocks(flat[start : start + size])
    else:
        for part in tensor:
            yield from blocks(part)


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of its storage; None if it has no storage of its own, such as a wrapper of other tensors."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    return tensor.untyped_storage().data_ptr() or None
