"""CRC32C, with and without what computes it fast."""

import subprocess
import sys

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.tensors.checksum import crc32c_of, is_fast


@given(first=st.binary(max_size=50), second=st.binary(max_size=50))
def test_checksums_go_on_from_those_before(first: bytes, second: bytes) -> None:
    """Of bytes, and of views that can or cannot be written to."""
    expected = google_crc32c.value(first + second)
    for kind in (bytes, memoryview, lambda data: memoryview(bytearray(data))):
        assert crc32c_of(kind(second), crc32c_of(kind(first))) == expected


_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from genserve.tensors.checksum import crc32c_of
print(hex(crc32c_of(memoryview(b"123456789"))))
"""


def test_without_numpy_views_are_copied() -> None:
    """google_crc32c takes no view."""
    told = subprocess.run([sys.executable, "-c", _WITHOUT_NUMPY], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.stderr) == ("0xe3069283\n", "")  # the check value of RFC 3720's polynomial


def test_what_is_not_there_or_in_python_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends no checksums then."""
    assert is_fast()
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    assert not is_fast()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert not is_fast()
