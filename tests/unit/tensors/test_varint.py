"""Numbers as protobuf writes them."""

import pytest
from google.protobuf.wrappers_pb2 import UInt64Value
from hypothesis import given
from hypothesis import strategies as st

from genserve.tensors.varint import read_varint, to_varint


@given(number=st.integers(1, 2**63 - 1), before=st.binary(max_size=3), after=st.binary(max_size=3))
def test_a_number_is_written_as_protobuf_does_and_read_again(number: int, before: bytes, after: bytes) -> None:
    """Wherever it lies."""
    encoded = to_varint(number)
    assert b"\x08" + encoded == UInt64Value(value=number).SerializeToString()
    assert read_varint(before + encoded + after, len(before)) == (number, len(before) + len(encoded))


def test_zero_is_one_byte() -> None:
    """protobuf leaves a field of it out."""
    assert to_varint(0) == b"\0"
    assert read_varint(b"\0", 0) == (0, 1)


def test_what_is_cut_off_or_too_long_is_no_number() -> None:
    """The one at the end of the data, and one of more than 63 bits."""
    with pytest.raises(IndexError):
        read_varint(b"\xff", 0)
    with pytest.raises(ValueError, match="long"):
        read_varint(b"\xff" * 9 + b"\x01", 0)
