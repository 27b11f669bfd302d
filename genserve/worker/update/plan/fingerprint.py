"""Tells contents of parameters apart, in little memory and at the speed of memory, on any device."""

import hashlib
from typing import Final

import torch

_ROW_BYTES: Final = 1 << 15
_WORD_BYTES: Final = 8


def fingerprint(tensor: torch.Tensor) -> bytes:
    """The same for the same bytes. For others, and for elements that lie elsewhere, it is another one, but for an
    unlikely chance: it tells the sums of the words of each row and of each column of the memory, seen as a table."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    num_rows = data.numel() // _ROW_BYTES
    end = num_rows * _ROW_BYTES
    table = data[:end].view(torch.int64).view(num_rows, _ROW_BYTES // _WORD_BYTES)
    found = hashlib.sha256()
    for part in (table.sum(0), table.sum(1), data[end:]):
        found.update(part.cpu().numpy())
    return found.digest()
