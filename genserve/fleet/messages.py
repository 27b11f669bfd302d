"""Messages of clients, which arrive as bytes."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from genserve.errors import InvalidFieldError

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 15


def read(kind: type[M], data: bytes) -> M:
    """The message. Raises InvalidFieldError if the bytes are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidFieldError.of("frame", "is not a message of this method") from None


async def parsed(kind: type[M], data: bytes, convert: Callable[[M], T]) -> T:
    """The result of `convert` for the message, in a thread if it is large, so that it does not stop other streams.
    Raises what `read` raises."""

    def converted() -> T:
        return convert(read(kind, data))

    return converted() if len(data) <= _SMALL_BYTES else await asyncio.to_thread(converted)
