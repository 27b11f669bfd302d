"""The header of a push and the request to fetch it say the same."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from genserve.fleet.push.header import HEADER_ONLY, REQUEST_ONLY, header_of, request_of
from genserve.v1 import weights_pb2

HEADER = weights_pb2.PushHeader.DESCRIPTOR.fields_by_name
REQUEST = weights_pb2.LoadWeightsRequest.DESCRIPTOR.fields_by_name
SHARED = sorted(set(HEADER) - HEADER_ONLY)


def filled(message: Message, names: list[str]) -> None:
    """Sets each of these fields to a value of its own, and so those of the messages in them."""
    for number, name in enumerate(names, 3):
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, name)
            filled(inner, list(inner.DESCRIPTOR.fields_by_name))
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, name, f"text {number}")
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(message, name, True)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            setattr(message, name, field.enum_type.values[-1].number)
        else:
            setattr(message, name, number)


def test_a_field_belongs_to_both_or_to_one_by_name() -> None:
    """One that is new in the proto has to be named here, or to be in both, under one type."""
    assert set(HEADER) >= HEADER_ONLY and set(REQUEST) >= REQUEST_ONLY
    assert set(HEADER) - HEADER_ONLY == set(REQUEST) - REQUEST_ONLY
    for name in SHARED:
        assert (HEADER[name].type, HEADER[name].has_presence) == (REQUEST[name].type, REQUEST[name].has_presence)
        assert HEADER[name].message_type is REQUEST[name].message_type


def test_every_field_goes_both_ways() -> None:
    """With its value."""
    header = weights_pb2.PushHeader()
    filled(header, SHARED)
    assert sorted(field.name for field, _ in header.ListFields()) == SHARED
    request = request_of(header)
    assert sorted(field.name for field, _ in request.ListFields()) == SHARED
    assert header_of(request) == header


@pytest.mark.parametrize("version", [None, 0, 3])
def test_a_version_that_is_expected_may_be_zero_or_none(version: int | None) -> None:
    """They differ: none does not compare."""
    header = header_of(weights_pb2.LoadWeightsRequest(expected_version=version))
    for message in (header, request_of(header)):
        assert message.HasField("expected_version") == (version is not None)
        assert message.expected_version == (version or 0)


def test_what_is_only_of_a_stream_or_a_source_stays() -> None:
    """Nothing else is copied."""
    header = weights_pb2.PushHeader(push_id="p", attempt="a", num_streams=4, lora=weights_pb2.LoraAdapter())
    assert request_of(header) == weights_pb2.LoadWeightsRequest(push_id="p")
    request = weights_pb2.LoadWeightsRequest(push_id="p", peers=weights_pb2.WeightPeers(addresses=["a:1"]))
    assert header_of(request) == weights_pb2.PushHeader(push_id="p")


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
