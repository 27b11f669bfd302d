"""Why a call ended that was still being written to.

A write that fails because the call is over makes grpc.aio put "Internal error from Core" in the place of the daemon's
answer (`Call._write`, grpcio 1.85). The answer is remembered here when it comes in, which may be before or after that.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

import grpc.aio

T = TypeVar("T")

_WRITE_FAILED: Final = "Internal error from Core"
_ANSWER_TIMEOUT_S: Final = 5.0  # the call is over: its status is on its way through gRPC's own threads


class FinalStatus:
    """Listens to `call` from its beginning."""

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._failures: list[grpc.aio.AioRpcError] = []
        self._answered = asyncio.Event()
        call.add_done_callback(self._remember)

    async def of(self, step: Awaitable[T]) -> T:
        """The result of a step of the call. Raises what the daemon answered, if the step only says that a write came
        too late."""
        try:
            return await step
        except grpc.aio.AioRpcError as error:
            if error.details() == _WRITE_FAILED:
                await self.wait()
            raise self.failure or error from None
        finally:
            del step  # a future that has failed and the traceback of its error would be a cycle

    async def wait(self) -> None:
        """Returns when the daemon's answer is here, for a call that is known to be over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._answered.wait()

    @property
    def failure(self) -> grpc.aio.AioRpcError | None:
        """What the daemon answered, if it was not OK."""
        return next((each for each in self._failures if each.details() != _WRITE_FAILED), None)

    def _remember(self, call: Any) -> None:
        """Called synchronously, each time that the call's status is set."""
        code, details, trailing = _result(call.code()), _result(call.details()), _result(call.trailing_metadata())
        if details != _WRITE_FAILED:
            self._answered.set()
        if code is not grpc.StatusCode.OK:
            self._failures.append(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details))


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing left to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("the call has no status yet")
