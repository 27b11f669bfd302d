"""The limit of the bytes of pushes."""

from genserve.weights.checkpoint import CheckpointIndex, CheckpointTensor
from genserve.weights.quota import limit_bytes

INDEX = CheckpointIndex({"a": CheckpointTensor("F32", (4,), 16)})


def test_the_limit_holds_two_versions_unless_it_is_given() -> None:
    """And 256 MiB; without the files nobody knows how much two are."""
    assert limit_bytes(0, INDEX) == 2 * 16 + (256 << 20)
    assert limit_bytes(0, None) == 64 << 30
    assert limit_bytes(7, INDEX) == limit_bytes(7, None) == 7
