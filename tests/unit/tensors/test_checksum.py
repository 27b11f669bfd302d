"""CRC32C, with and without what computes it fast."""

import sys

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.tensors import checksum
from genserve.tensors.checksum import crc32c_of, is_fast


@given(first=st.binary(max_size=50), second=st.binary(max_size=50))
def test_checksums_go_on_from_those_before(first: bytes, second: bytes) -> None:
    """Of bytes, and of views that can or cannot be written to."""
    expected = google_crc32c.value(first + second)
    for kind in (bytes, memoryview, lambda data: memoryview(bytearray(data))):
        assert crc32c_of(kind(second), crc32c_of(kind(first))) == expected


def test_without_numpy_views_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """google_crc32c takes no view."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    checksum._extend.cache_clear()
    try:
        assert crc32c_of(memoryview(b"123456789")) == 0xE3069283  # the check value of RFC 3720's polynomial
    finally:
        checksum._extend.cache_clear()


def test_what_is_not_there_or_in_python_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends no checksums then."""
    assert is_fast()
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    assert not is_fast()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert not is_fast()
