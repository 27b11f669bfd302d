"""When memory is handed over instead of bytes."""

import os

import pytest

from genserve.client.shared_memory import SharedSegment, SpareSegment, can_share, is_local, own_host_id
from genserve.v1 import weights_pb2


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/genserve", True),
        ("10.0.0.1:1", False),
        ("trainer-127.example:1", False),
        ("dns:///replica:1", False),
    ],
)
def test_targets_on_this_host(target: str, local: bool) -> None:
    """By name; whether the daemon is there too is told by its host_id."""
    assert is_local(target) is local
    assert can_share(target, own_host_id()) is local
    assert not can_share(target, "")
    assert not can_share(target, "another host")


def test_a_frame_names_what_was_written() -> None:
    """Any process of this user can read it there."""
    segment = SharedSegment(100)
    segment.write(10, [b"abc", memoryview(b"defg")])
    frame = weights_pb2.PushWeightsRequest.FromString(segment.frame(10, 7)).segment
    with open(frame.path, "rb") as memory:
        memory.seek(frame.segment_offset)
        assert memory.read(frame.length) == b"abcdefg"
    segment.close()
    segment.close()
    assert not os.path.exists(frame.path)


def test_memory_is_kept_for_a_push_of_the_same_size() -> None:
    """For one at a time."""
    spare = SpareSegment()
    first = spare.take(10)
    spare.give_back(first)
    assert spare.take(10) is first
    second = spare.take(10)
    assert second is not first
    spare.give_back(second)
    larger = spare.take(11)
    assert larger is not second
    for segment in (first, second, larger):
        segment.close()
