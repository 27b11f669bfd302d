"""Why a call ended that was still being written to.

A write that fails because the daemon has answered already makes grpc.aio put "Internal error from Core" in the place of
that answer (`Call._write`, grpcio 1.85). The answer is remembered here at the moment it comes in.
"""

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc.aio

T = TypeVar("T")

_WRITE_FAILED: Final = "Internal error from Core"


class FinalStatus:
    """Listens to `call` from its beginning."""

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call
        self._failures: list[grpc.aio.AioRpcError] = []
        call.add_done_callback(self._remember)

    def cause_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """What the daemon answered, if `error` only says that a write came too late."""
        return self.failure or error

    @property
    def failure(self) -> grpc.aio.AioRpcError | None:
        """What the daemon answered, if it was not OK."""
        return next((each for each in self._failures if each.details() != _WRITE_FAILED), None)

    def _remember(self, _: object) -> None:
        """Called synchronously, each time that the call's status is set."""
        call = self._call
        code, details, trailing = _result(call.code()), _result(call.details()), _result(call.trailing_metadata())
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
