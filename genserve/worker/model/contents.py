"""The contents of tensors: where they lie, and their digests."""

import hashlib

import torch


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the contents."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of its storage; None if it has no storage of its own, such as a wrapper of other tensors."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    return tensor.untyped_storage().data_ptr() or None
