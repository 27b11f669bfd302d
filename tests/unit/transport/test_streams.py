"""Why a call has ended, whichever of its steps learns of the end first."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from genserve.transport.streams import FinalStatus
from tests.support.clocks import leaping_clock
from tests.support.patience import STEP_S, turns

WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says of a write to a call that is over, and of the call from then on."""


class Call:
    """As one of grpc.aio, as far as its end goes."""

    def __init__(self) -> None:
        self._tell: list[Callable[[Any], None]] = []
        self._status: tuple[grpc.StatusCode, str] = (grpc.StatusCode.OK, "")

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._tell.append(callback)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Sets its status: gRPC does so once for a failed write, and once for the daemon's answer."""
        self._status = code, details
        for tell in self._tell:
            tell(self)

    async def code(self) -> grpc.StatusCode:
        return self._status[0]

    async def details(self) -> str:
        return self._status[1]

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(("reason", self._status[1]))


@pytest.fixture
def call() -> Call:
    return Call()


@pytest.fixture
def status(call: Call) -> FinalStatus:
    return FinalStatus(call)  # type: ignore[arg-type]


async def failing(details: str, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
    """A step that raises what grpc.aio does."""
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


async def test_a_step_that_succeeds_is_as_without_it(status: FinalStatus) -> None:
    """Its result is the caller's."""

    async def step() -> int:
        return 7

    assert await status.of(step()) == 7
    assert status.failure is None


async def test_a_write_that_fails_after_the_answer_raises_the_answer(call: Call, status: FinalStatus) -> None:
    """With what the daemon has said."""
    call.end(grpc.StatusCode.ABORTED, "conflict")
    call.end(grpc.StatusCode.INTERNAL, WRITE_FAILED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status.of(failing(WRITE_FAILED))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "conflict")
    assert dict(caught.value.trailing_metadata()) == {"reason": "conflict"}


async def test_a_write_that_fails_before_the_answer_waits_for_it(call: Call, status: FinalStatus) -> None:
    """It is on its way through gRPC's threads."""
    call.end(grpc.StatusCode.INTERNAL, WRITE_FAILED)
    writing = asyncio.create_task(status.of(failing(WRITE_FAILED)))
    await turns()
    assert not writing.done()
    call.end(grpc.StatusCode.UNAVAILABLE, "draining")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await writing
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_answer_that_never_comes_is_not_waited_for(call: Call, status: FinalStatus) -> None:
    """Nor does an OK replace the error of a step."""
    with leaping_clock():
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status.of(failing(WRITE_FAILED))
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, WRITE_FAILED)
            call.end(grpc.StatusCode.OK, "")


async def test_another_error_is_reported_at_once(status: FinalStatus) -> None:
    """It is the daemon's own, or the connection's."""
    with pytest.raises(grpc.aio.AioRpcError, match="reset"):  # what the step has raised
        await asyncio.wait_for(status.of(failing("reset", grpc.StatusCode.UNAVAILABLE)), STEP_S)
