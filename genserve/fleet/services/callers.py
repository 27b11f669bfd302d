"""Clients of a router that ask for tokens, and their messages, which arrive as bytes."""

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


_LONG_S: Final = 366 * 24 * 3600.0
"""A deadline beyond this is none."""
_HEAD_BYTES: Final = 2048
_ITEMS_PER_MESSAGE: Final = 256  # of errors, which have at most 4 KiB each


def remaining_s(context: "ServicerContext[Any, Any]") -> float | None:
    """The time until a call's deadline, None = it has none."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None or remaining > _LONG_S else max(0.0, remaining)


class RemoteCaller:
    """The client of one call."""

    def __init__(self, context: "ServicerContext[bytes, bytes]", deadline: WriteDeadline) -> None:
        self._context = context
        self._deadline = deadline

    def remaining_s(self) -> float | None:
        """The time until the call's deadline, None = it has none."""
        return remaining_s(self._context)

    async def admitted(self) -> None:
        """The call has been admitted. Its metadata are not those of a replica: the ports of the replica's front ends
        are not the router's."""
        await self._context.send_initial_metadata(())

    async def write(self, data: bytes) -> None:
        """Passes on a message."""
        await self._deadline.write(self._context.write, data)

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Tells of requests of a stream that have failed."""
        items = [
            generation_pb2.GenerateManyItem(request_id=each.request_id, error=to_message(each.error))
            for each in failures
        ]
        for start in range(0, len(items), _ITEMS_PER_MESSAGE):
            part = items[start : start + _ITEMS_PER_MESSAGE]
            await self.write(generation_pb2.GenerateManyResponse(items=part).SerializeToString())

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """Ends the call as the replica has ended it, with what this version does not know of the error as well."""
        metadata = tuple(await call.trailing_metadata() or ())
        await self._context.abort(await call.code(), await call.details() or "", metadata)


async def actions_of(frames: AsyncIterator[bytes]) -> AsyncIterator[Action]:
    """What the messages of a GenerateMany call say."""
    async for frame in frames:
        yield await _action(frame)


async def _action(frame: bytes) -> Action:
    try:
        return await parsed(generation_pb2.GenerateManyRequest, frame, lambda message: action_of(message, frame))
    except GenserveError as error:
        return Failure(named_in(frame[:_HEAD_BYTES]), error)
