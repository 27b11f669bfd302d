"""What a trainer's push says, as the header of a stream and as a request to fetch it. Pure."""

from typing import Final, TypeVar

from google.protobuf.message import Message

from genserve.v1 import weights_pb2

M = TypeVar("M", bound=Message)

HEADER_ONLY: Final = frozenset({"manifest", "manifest_digest", "num_streams", "lora", "attempt"})
"""Fields that describe a stream: what it brings, and which streams belong together. A source says that itself."""
REQUEST_ONLY: Final = frozenset({"checkpoint_path", "peers", "previous", "fleet"})
"""Fields that say where a version is fetched from, and what the fleet is with it."""
_APPLIES: Final = (
    weights_pb2.PUSH_ACTION_UNSPECIFIED,
    weights_pb2.PUSH_ACTION_APPLY,
    weights_pb2.PUSH_ACTION_PREPARE,
)


def header_of(request: weights_pb2.LoadWeightsRequest) -> weights_pb2.PushHeader:
    """The push that a request to fetch a version begins."""
    return _with_fields(weights_pb2.PushHeader(), request, but=REQUEST_ONLY)


def request_of(header: weights_pb2.PushHeader) -> weights_pb2.LoadWeightsRequest:
    """The request for the same push, without a source."""
    return _with_fields(weights_pb2.LoadWeightsRequest(), header, but=HEADER_ONLY)


def applies(header: weights_pb2.PushHeader) -> bool:
    """Whether workers prepare it: one push of weights at a time."""
    return header.action in _APPLIES and not header.HasField("lora")


def _with_fields(target: M, source: Message, *, but: frozenset[str]) -> M:
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
    return target
