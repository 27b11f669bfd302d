"""What the client is told of the costs of a push."""

from google.protobuf.duration_pb2 import Duration

from genserve.client import Applied
from genserve.v1 import weights_pb2


def test_what_a_daemon_does_not_know_yet_is_none_and_not_zero() -> None:
    """An older daemon tells none of it."""
    told = Applied.of(weights_pb2.Applied())
    assert (told.recomputed_tokens, told.longest_wait_s, told.discard_s) == (None, None, None)
    known = weights_pb2.Applied(recomputed_tokens=0, longest_wait=Duration(), discard=Duration(nanos=500_000_000))
    told = Applied.of(known)
    assert (told.recomputed_tokens, told.longest_wait_s, told.discard_s) == (0, 0.0, 0.5)
