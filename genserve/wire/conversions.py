"""Domain types as protobuf messages and back, where two ends need the same conversion: the client, the servicers and
the processes that receive pushes. What only one of them converts is with it."""

from google.protobuf.duration_pb2 import Duration

from genserve.memory.ring import Piece
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.v1 import weights_pb2


def manifest_message(manifest: Manifest) -> weights_pb2.Manifest:
    """For the wire."""
    return weights_pb2.Manifest(
        tensors=[
            weights_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, length=t.length)
            for t in manifest.tensors
        ],
        total_bytes=manifest.total_bytes,
        partial=manifest.partial,
    )


def manifest_of(message: weights_pb2.Manifest) -> Manifest:
    """The tensors as they were sent, unchecked."""
    tensors = tuple(TensorSpec(t.name, t.dtype, tuple(t.shape), t.offset, t.length) for t in message.tensors)
    return Manifest(tensors, message.total_bytes, message.partial)


def segment_frame(offset: int, piece: Piece) -> bytes:
    """The frame of a push for the bytes of the byte space at `offset`, which are in shared memory."""
    segment = weights_pb2.PushSegment(
        path=piece.path,
        segment_offset=piece.start,
        offset=offset,
        length=piece.length,
        taken_path=piece.ack_path,
    )
    return weights_pb2.PushWeightsRequest(segment=segment).SerializeToString()


def duration_of(seconds: float) -> Duration:
    """Seconds, to the nanosecond. Raises ValueError and OverflowError for what a Duration cannot hold."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def seconds_of(duration: Duration) -> float:
    """In seconds; a duration that is not set is 0."""
    return duration.ToNanoseconds() / 1e9
