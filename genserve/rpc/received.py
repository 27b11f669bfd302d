"""Requests of GenerationService as they arrive: bytes until they are needed.

gRPC parses on the event loop, where a large message would stop every stream. So small messages are parsed there, large
ones in a thread together with their conversion, and messages that no honest client sends are not parsed.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from google.protobuf.message import Message

from genserve.errors import MessageTooLargeError

M = TypeVar("M", bound=Message)
P = ParamSpec("P")
T = TypeVar("T")

_SMALL_BYTES = 1 << 15
_HEAD_BYTES = 2048


class Received(Generic[M]):
    """One message. Above `limit_bytes` only its size and `head` are kept."""

    def __init__(self, kind: type[M], limit_bytes: int, data: bytes) -> None:
        self._kind = kind
        self._size_bytes = len(data)
        self._limit_bytes = limit_bytes
        self._data = data if len(data) <= limit_bytes else b""
        self.head = data[:_HEAD_BYTES]

    async def read(self, convert: Callable[Concatenate[M, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `convert` for the message and these arguments. Raises MessageTooLargeError, and DecodeError
        for an invalid message."""
        if self._size_bytes > self._limit_bytes:
            raise MessageTooLargeError(
                f"the request has {self._size_bytes} bytes; none for this model needs more than {self._limit_bytes}"
            )
        if self._size_bytes <= _SMALL_BYTES:
            return convert(self._kind.FromString(self._data), *args, **kwargs)
        return await asyncio.to_thread(lambda: convert(self._kind.FromString(self._data), *args, **kwargs))


def receiver(kind: type[Any], limit_bytes: int) -> Callable[[bytes], Received[Any]]:
    """A deserializer for messages of a kind."""
    return partial(Received, kind, limit_bytes)
