"""A stream of responses as an async iterator that ends its call when it is closed."""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from genserve.client.errors import error_of

ItemT = TypeVar("ItemT")


class ResponseStream(AsyncIterator[ItemT], Generic[ItemT]):
    """The responses of one call, in order.

    The call has begun when this exists. It is cancelled, which ends the request in the daemon, by `aclose()`, by
    leaving `async with`, by cancelling the task that iterates, and when the stream is dropped unfinished.
    """

    def __init__(
        self, call: "grpc.aio.UnaryStreamCall[Any, Any]", convert: Callable[[Any], ItemT], target: str
    ) -> None:
        self._call = call
        self._convert = convert
        self._target = target
        self._closed = False

    async def __anext__(self) -> ItemT:
        """The next response. Raises a `GenserveError` if the call failed."""
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._target) from error
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._convert(message)

    async def aclose(self) -> None:
        """Cancels the call unless it is over."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
