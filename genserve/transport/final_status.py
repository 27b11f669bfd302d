"""The reason why a call ended while it was being written to.

If a write fails because the call is over, grpc.aio replaces the daemon's answer by "Internal error from Core"
(`Call._write`, grpcio 1.85). This module stores the answer when it arrives, which may be before or after the failed
write.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

import grpc.aio

T = TypeVar("T")

_WRITE_FAILED: Final = "Internal error from Core"
_ANSWER_TIMEOUT_S: Final = 5.0  # the call is over: its status is still passing through gRPC's threads


class FinalStatus:
    """Observes `call` from its beginning."""

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
