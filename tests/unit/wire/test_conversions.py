"""What two ends of the wire convert comes back as it was."""

import pytest

from genserve.memory.ring import Piece
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.v1 import weights_pb2
from genserve.wire.conversions import duration_of, manifest_message, manifest_of, seconds_of, segment_frame


def test_a_manifest_survives_the_round_trip() -> None:
    """Every field: what GetWeights tells can be pushed as it is."""
    manifest = Manifest((TensorSpec("b", "F32", (2, 3), 5, 24), TensorSpec("a", "U8", (), 4, 1)), 29, partial=True)
    assert manifest_of(manifest_message(manifest)) == manifest


def test_a_manifest_has_its_fields_under_their_names() -> None:
    """The round trip alone would not notice two that change places."""
    manifest = Manifest((TensorSpec("b", "F32", (2, 3), 5, 24),), 29, partial=True)
    tensor = weights_pb2.TensorSpec(name="b", dtype="F32", shape=[2, 3], offset=5, length=24)
    assert manifest_message(manifest) == weights_pb2.Manifest(tensors=[tensor], total_bytes=29, partial=True)


def test_a_piece_of_shared_memory_is_named_with_its_place_in_the_push() -> None:
    """Two places: in the memory, and in the byte space."""
    frame = weights_pb2.PushWeightsRequest.FromString(segment_frame(7, Piece("/memory", 3, 11, "/pipe")))
    assert frame.segment == weights_pb2.PushSegment(
        path="/memory", segment_offset=3, offset=7, length=11, taken_path="/pipe"
    )


def test_durations_survive_the_round_trip() -> None:
    """Nanoseconds too."""
    for seconds in (0.0, 1e-9, 0.1, 1.5, 3600.000000001):
        assert seconds_of(duration_of(seconds)) == pytest.approx(seconds, abs=1e-10)
