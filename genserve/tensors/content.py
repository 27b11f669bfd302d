"""A digest of what tensors contain, wherever their bytes lie. Pure."""

import hashlib
from collections.abc import Callable, Iterable

from genserve.tensors.manifest import TensorSpec

HASHED_AT_ONCE_BYTES = 16 << 20


def tensor_digest(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
    """SHA-256, in hex, of the bytes of a tensor. `view` returns the bytes [start, end) of the byte space. Call it in a
    thread: it takes about a second per GB, and lets other threads run."""
    sha256 = hashlib.sha256()
    end = tensor.offset + tensor.length
    for start in range(tensor.offset, end, HASHED_AT_ONCE_BYTES):
        sha256.update(view(start, min(end, start + HASHED_AT_ONCE_BYTES)))
    return sha256.hexdigest()


def content_digest(digests: Iterable[tuple[TensorSpec, str]]) -> str:
    """SHA-256, in hex, of tensors and their digests; `PushHeader.content_digest` gives the format."""
    sha256 = hashlib.sha256()
    for tensor, digest in sorted(digests, key=lambda pair: pair[0].name):
        shape = ",".join(map(str, tensor.shape))
        sha256.update(f"{tensor.name}\t{tensor.dtype}\t{shape}\t{digest}\n".encode())
    return sha256.hexdigest()
