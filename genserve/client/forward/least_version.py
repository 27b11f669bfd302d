"""The version that a request needs at least, written into its message without parsing that: of a field that is there
twice, a parser takes the last, and it merges parts of one message."""

from typing import Final

from genserve.tensors.varint import to_varint

_MIN_WEIGHT_VERSION_TAG: Final = to_varint(18 << 3)  # of GenerateRequest
_GENERATE_TAG: Final = b"\x0a"  # of GenerateManyRequest


def needing(asked: int | None, known: int | None) -> int | None:
    """The version to write into a request that asks for one itself, if it is known that all replicas serve another;
    None = what it asks for is enough."""
    return None if known is None or known == 0 or (asked is not None and asked >= known) else known


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
