"""A request to fetch a version, and the push that it begins."""

import pytest

from genserve.fleet.push.header import header_of, request_of
from genserve.v1 import weights_pb2


@pytest.mark.parametrize(
    "source",
    [
        {"checkpoint_path": "/c"},
        {"peers": weights_pb2.WeightPeers(addresses=["a:1"])},
        {"previous": weights_pb2.PreviousVersion()},
    ],
)
def test_a_push_does_not_say_where_its_bytes_are_from(source: dict[str, object]) -> None:
    """Whichever source the request names: the other replicas fetch it from the first one."""
    header = header_of(weights_pb2.LoadWeightsRequest(push_id="p", force=True, **source))  # type: ignore[arg-type]
    assert header == weights_pb2.PushHeader(push_id="p", force=True)
    assert request_of(header) == weights_pb2.LoadWeightsRequest(push_id="p", force=True)
