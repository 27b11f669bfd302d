"""The messages of a call: an iterator of responses that ends its call when it is closed or dropped, and why a call
ended while it was being written to. Also what gives such objects `with`."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import grpc.aio

T = TypeVar("T")
ItemT = TypeVar("ItemT")

_WRITE_FAILED: Final = "Internal error from Core"
_ANSWER_TIMEOUT_S: Final = 5.0  # the call is over: its status is still passing through gRPC's threads

TypedErrors: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Turns gRPC's errors that are raised inside into a `GenserveError`."""
EOF: Final[Any] = grpc.aio.EOF
"""What `MessageReader.next` returns at the end."""
_READ_AHEAD: Final = 8  # messages; gRPC holds back further ones


class Closing:
    """Adds `with` to a class that has a `close`."""

    def close(self) -> None:
        """May be called more than once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """Adds `async with` and `aclose` to a class that has a `cancel`."""

    def cancel(self) -> None:
        """`aclose` for callbacks. May be called more than once."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Cancels the call unless it is over."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FinalStatus:
    """Why a call ended, observed from its beginning.

    If a write fails because the call is over, grpc.aio replaces the daemon's answer by "Internal error from Core"
    (`Call._write`, grpcio 1.85). This stores the answer when it arrives, before or after the failed write.
    """

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._failures: list[tuple[grpc.StatusCode, grpc.aio.Metadata, str]] = []
        self._answered = asyncio.Event()
        call.add_done_callback(self._remember)

    async def of(self, step: Awaitable[T]) -> T:
        """Returns the result of a step of the call. Raises the daemon's answer if the step only fails because a write
        came too late."""
        try:
            return await step
        except grpc.aio.AioRpcError as error:
            if error.details() == _WRITE_FAILED:
                await self.wait()
            raise self.failure or error from None
        finally:
            del step  # a failed future and the traceback of its error would form a cycle

    async def wait(self) -> None:
        """Waits for the daemon's answer to a call that is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._answered.wait()

    @property
    def failure(self) -> grpc.aio.AioRpcError | None:
        """The daemon's answer, if it was not OK. A new error each time: one that was raised and is kept would form a
        cycle with its traceback."""
        for code, trailing, details in self._failures:
            if details != _WRITE_FAILED:
                return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)
        return None

    def _remember(self, call: Any) -> None:
        """Called synchronously each time the call's status is set."""
        code, details, trailing = _result(call.code()), _result(call.details()), _result(call.trailing_metadata())
        if details != _WRITE_FAILED:
            self._answered.set()
        if code is not grpc.StatusCode.OK:
            self._failures.append((code, trailing, details))


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not wait any more."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("the call has no status yet")


@dataclass(frozen=True, slots=True)
class _End:
    """The entry after the last message, with the error that ended the call, if any."""

    error: BaseException | None


class MessageReader:
    """The messages of one call, in order, each returned once.

    A task reads them, so that a wait in `next` can be cancelled, as `asyncio.wait_for` does, without a loss: cancelling
    gRPC's own `read` would end the call. The call is cancelled by `cancel`, and when this object is dropped.
    """

    def __init__(self, call: Any, typed_errors: TypedErrors, status: FinalStatus | None = None) -> None:
        self._call = call
        self._typed_errors = typed_errors
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._messages: asyncio.Queue[Any] = asyncio.Queue(_READ_AHEAD)
        self._reading = self._loop.create_task(_read_all(call, status, self._messages))
        self._cancelled = False

    async def next(self) -> Any:
        """The next message, or EOF. Raises a `GenserveError` if the call failed."""
        try:
            message = self._messages.get_nowait() if not self._messages.empty() else await self._messages.get()
        except BaseException:
            del self  # a cancelled task keeps its error, and that this frame: a stream that nothing else has ends now
            raise
        if not isinstance(message, _End):
            return message
        self._messages.put_nowait(message)  # for other waiting readers, and the next time
        if message.error is None or self._cancelled:
            return EOF
        try:
            with self._typed_errors():
                raise message.error
        finally:
            message.error.with_traceback(None)  # would form a cycle of this frame and the error

    def cancel(self) -> None:
        """Cancels the call unless it is over. Readers get EOF."""
        self._cancelled = True
        self._reading.cancel()
        self._call.cancel()
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(_End(None))

    def __del__(self) -> None:
        # Called on any thread by the garbage collector, so it can neither wait nor touch the call, which belongs to the
        # loop's thread. A forked process has no such thread.
        if self._pid == os.getpid() and not self._reading.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_cancel, self._reading, self._call)


class ResponseStream(AsyncClosing, AsyncIterator[ItemT], Generic[ItemT]):
    """The responses of one call that has begun, in order.

    The call is cancelled, which ends the request in the daemon, by `aclose()`, by leaving `async with`, and when the
    stream is dropped unfinished. If a wait for an item is cancelled or times out, nothing is lost: the next wait
    continues there.
    """

    def __init__(self, call: Any, convert: Callable[[Any], ItemT], typed_errors: TypedErrors) -> None:
        self._messages = MessageReader(call, typed_errors)
        self._convert = convert

    async def __anext__(self) -> ItemT:
        """The next response. Raises a `GenserveError` if the call failed, ClientClosedError if the client is closed."""
        try:
            message = await self._messages.next()
        except BaseException:
            del self  # as MessageReader.next
            raise
        if message is EOF:
            raise StopAsyncIteration
        return self._convert(message)

    def cancel(self) -> None:
        """`aclose` for callbacks."""
        self._messages.cancel()


async def _read_all(call: Any, status: FinalStatus | None, messages: "asyncio.Queue[Any]") -> None:
    """Not a method, because the task must not keep a dropped reader alive."""
    try:
        while True:
            message = await (call.read() if status is None else status.of(call.read()))
            if message is EOF:
                end = _End(None)
                break
            if messages.full():
                await messages.put(message)
            else:
                messages.put_nowait(message)
    except (Exception, asyncio.CancelledError) as error:
        end = _End(error.with_traceback(None))
        if messages.full() and isinstance(error, asyncio.CancelledError):
            return  # nobody reads any more
    await messages.put(end)


def _cancel(reading: "asyncio.Task[None]", call: Any) -> None:
    reading.cancel()
    call.cancel()
