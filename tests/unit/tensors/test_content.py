"""The digest of contents: the same wherever the bytes lie, another one for anything else."""

import hashlib
import struct

import pytest

from genserve.tensors import content
from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.manifest import Manifest, TensorSpec

# In this order in memory, which is not that of the names.
BYTES = struct.pack("<2f", 1.0, -2.0) + bytes(range(6)) + struct.pack("<f", 0.5)
WEIGHT = TensorSpec("w", "F32", (2,), 0, 8)
CODES = TensorSpec("a.codes", "U8", (2, 3), 8, 6)
SCALE = TensorSpec("scale", "F32", (), 14, 4)
EMPTY = TensorSpec("empty", "BF16", (0, 3), 18, 0)
MANIFEST = Manifest((WEIGHT, CODES, SCALE, EMPTY), 18)
# Written by hand from the comment of PushHeader.content_digest.
VECTOR = "".join(
    f"{line}\t{hashlib.sha256(data).hexdigest()}\n"
    for line, data in (
        ("a.codes\tU8\t2,3", b"\x00\x01\x02\x03\x04\x05"),
        ("empty\tBF16\t0,3", b""),
        ("scale\tF32\t", b"\x00\x00\x00\x3f"),
        ("w\tF32\t2", b"\x00\x00\x80\x3f\x00\x00\x00\xc0"),
    )
).encode()


def digest_of(manifest: Manifest, data: bytes = BYTES) -> str:
    return content_digest(
        (t, tensor_digest(t, lambda start, end: memoryview(data)[start:end])) for t in manifest.tensors
    )


def test_it_is_that_of_a_vector_written_by_hand() -> None:
    """Lines and bytes in order of the names."""
    assert digest_of(MANIFEST) == hashlib.sha256(VECTOR).hexdigest()


def test_places_do_not_count() -> None:
    """Another order, another offset: the same contents."""
    moved = Manifest(tuple(TensorSpec(t.name, t.dtype, t.shape, t.offset + 5, t.length) for t in MANIFEST.tensors), 23)
    assert digest_of(moved, b"xxxxx" + BYTES) == digest_of(MANIFEST)
    assert digest_of(Manifest(MANIFEST.tensors[::-1], 18)) == digest_of(MANIFEST)


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("v", "F32", (2,), 0, 8),
        TensorSpec("w", "I32", (2,), 0, 8),
        TensorSpec("w", "F32", (1, 2), 0, 8),
        TensorSpec("w", "F32", (2,), 4, 8),
    ],
)
def test_everything_else_counts(other: TensorSpec) -> None:
    """Names, types, shapes and bytes."""
    assert digest_of(Manifest((other, *MANIFEST.tensors[1:]), 18)) != digest_of(MANIFEST)


def test_a_tensor_larger_than_a_piece_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No view of all of it is kept, and the digest is the same."""
    asked: list[tuple[int, int]] = []

    def view(start: int, end: int) -> memoryview:
        asked.append((start, end))
        return memoryview(BYTES)[start:end]

    monkeypatch.setattr(content, "HASHED_AT_ONCE_BYTES", 4)
    assert tensor_digest(CODES, view) == hashlib.sha256(BYTES[8:14]).hexdigest()
    assert asked == [(8, 12), (12, 14)]
