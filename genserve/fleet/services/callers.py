"""A router's calls for tokens: the client of each call, and its messages, which arrive as bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from genserve.errors import GenserveError, InvalidFieldError
from genserve.forward.caller import Action, Failure, action_of
from genserve.rpc.status import to_message
from genserve.rpc.streams.generate_many import named_in
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext, UnaryStreamCall

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 15
_HEAD_BYTES: Final = 2048
_ITEMS_PER_MESSAGE: Final = 256  # of errors, which have at most 4 KiB each
_LONG_S: Final = 366 * 24 * 3600.0
"""A deadline further away counts as none."""


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


def remaining_s(context: "ServicerContext[Any, Any]") -> float | None:
    """Seconds until a call's deadline; None = it has none."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None or remaining > _LONG_S else max(0.0, remaining)


class RemoteCaller:
    """The client of one call."""

    def __init__(self, context: "ServicerContext[bytes, bytes]", deadline: WriteDeadline) -> None:
        self._context = context
        self._deadline = deadline

    def remaining_s(self) -> float | None:
        """Seconds until the call's deadline; None = it has none."""
        return remaining_s(self._context)

    async def admitted(self) -> None:
        """Sends the initial metadata, which mean that the call is admitted. They are empty: a replica's metadata name
        the ports of its front ends, which are not the router's."""
        await self._context.send_initial_metadata(())

    async def write(self, data: bytes) -> None:
        """Passes on a message."""
        await self._deadline.write(self._context.write, data)

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Reports failed requests of a stream."""
        items = [
            generation_pb2.GenerateManyItem(request_id=each.request_id, error=to_message(each.error))
            for each in failures
        ]
        for start in range(0, len(items), _ITEMS_PER_MESSAGE):
            part = items[start : start + _ITEMS_PER_MESSAGE]
            await self.write(generation_pb2.GenerateManyResponse(items=part).SerializeToString())

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """Ends the call with the replica's status, including details of the error that this version does not know."""
        metadata = tuple(await call.trailing_metadata() or ())
        await self._context.abort(await call.code(), await call.details() or "", metadata)


async def actions_of(frames: AsyncIterator[bytes]) -> AsyncIterator[Action]:
    """The actions that the messages of a GenerateMany call ask for."""
    async for frame in frames:
        yield await _action(frame)


async def _action(frame: bytes) -> Action:
    try:
        return await parsed(generation_pb2.GenerateManyRequest, frame, lambda message: action_of(message, frame))
    except GenserveError as error:
        return Failure(named_in(frame[:_HEAD_BYTES]), error)
