"""The version that a request needs at least, written into its message without parsing that: of a field that is there
twice, a parser takes the last, and it merges parts of one message."""

from typing import Final

from genserve.forward.forwarded import Forwarded
from genserve.forward.upstream import TokenUpstream
from genserve.tensors.varint import to_varint

_MIN_WEIGHT_VERSION_TAG: Final = to_varint(18 << 3)  # of GenerateRequest
_GENERATE_TAG: Final = b"\x0a"  # of GenerateManyRequest


def needed(forwarded: Forwarded, upstream: TokenUpstream) -> int | None:
    """The version to write into a request before it is sent to a replica, None = what it asks for itself is enough. A
    request that goes on elsewhere goes on with weights that are not older than those that sampled its last token."""
    known = upstream.least_version
    if known is None:
        return None
    least = known if forwarded.resumption is None else max(known, forwarded.resumption.last_version)
    asked = forwarded.request.min_weight_version
    return None if least == 0 or (asked is not None and asked >= least) else least


def in_generate(data: bytes, version: int | None) -> bytes:
    """A GenerateRequest that needs this version."""
    return data if version is None else data + _field(version)


def in_generate_many(data: bytes, version: int | None) -> bytes:
    """A GenerateManyRequest whose request needs this version."""
    if version is None:
        return data
    field = _field(version)
    return data + _GENERATE_TAG + to_varint(len(field)) + field


def _field(version: int) -> bytes:
    return _MIN_WEIGHT_VERSION_TAG + to_varint(version)
