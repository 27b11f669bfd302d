"""A digest of what tensors contain, wherever their bytes lie. Pure."""

import hashlib
from collections.abc import Callable

from genserve.tensors.manifest import Manifest

_HASHED_AT_ONCE_BYTES = 16 << 20


def content_digest(manifest: Manifest, view: Callable[[int, int], memoryview]) -> str:
    """SHA-256, in hex, of the tensors in order of their names; `PushHeader.content_digest` gives the format. `view`
    returns the bytes [start, end) of the byte space. Call it in a thread: it takes about a second per GB, and lets
    other threads run."""
    sha256 = hashlib.sha256()
    for t in sorted(manifest.tensors, key=lambda tensor: tensor.name):
        sha256.update(f"{t.name}\t{t.dtype}\t{','.join(map(str, t.shape))}\n".encode())
        end = t.offset + t.length
        for start in range(t.offset, end, _HASHED_AT_ONCE_BYTES):
            sha256.update(view(start, min(end, start + _HASHED_AT_ONCE_BYTES)))
    return sha256.hexdigest()
