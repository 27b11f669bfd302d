"""What a handler raises ends its call in the right way, whatever the timing."""

import asyncio
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from genserve.errors import QueueFullError
from genserve.rpc.handlers import Handler
from genserve.rpc.interceptor import StatusInterceptor


class Context:
    """A call that remembers the status with which it was ended."""

    status: Any = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort_with_status(self, status: Any) -> None:
        self.status = status
        raise grpc.aio.AbortError


async def guarded(raised: BaseException) -> Handler:
    """A handler that raises, as the server would call it."""

    async def behavior(request: object, context: Context) -> None:
        raise raised

    async def continuation(details: object) -> Handler:
        return grpc.unary_unary_rpc_method_handler(behavior)

    handler = await StatusInterceptor().intercept_service(continuation, SimpleNamespace(method="/a/b"))  # type: ignore[arg-type]
    assert handler is not None
    return handler


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), grpc.aio.InternalError("ExecuteBatchError")])
async def test_a_client_that_has_gone_is_a_cancellation_and_no_error(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC raises one or the other at a write, as the race goes; neither may be answered or logged as our error."""
    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await (await guarded(raised)).unary_unary(None, context)  # type: ignore[misc]
    assert context.status is None
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_handler_that_has_ended_its_call_itself_is_left_alone() -> None:
    """Its status stands."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await (await guarded(grpc.aio.AbortError())).unary_unary(None, context)  # type: ignore[misc]
    assert context.status is None


async def test_an_error_of_ours_becomes_its_status() -> None:
    """And the call is ended with it, not with an answer."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await (await guarded(QueueFullError("full"))).unary_unary(None, context)  # type: ignore[misc]
    assert context.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_nothing_keeps_what_a_handler_that_failed_has_held() -> None:
    """gRPC keeps the error that ends a call: it must not lead to the handler's frames."""
    known: list[weakref.ref[Context]] = []

    async def behavior(request: object, context: Context) -> None:
        held = Context()
        known.append(weakref.ref(held))
        raise QueueFullError("full") from ValueError("why")

    async def continuation(details: object) -> Handler:
        return grpc.unary_unary_rpc_method_handler(behavior)

    handler = await StatusInterceptor().intercept_service(continuation, SimpleNamespace(method="/a/b"))  # type: ignore[arg-type]
    assert handler is not None
    gc.disable()
    try:
        with pytest.raises(grpc.aio.AbortError) as kept:
            await handler.unary_unary(None, Context())  # type: ignore[misc]
        assert (kept.value.__context__, known[0]()) == (None, None)
    finally:
        gc.enable()


async def test_calls_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    """One line a call, with its outcome; none at all in production."""
    for level, num_lines in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.clear()
        with caplog.at_level(level, logger="genserve"), pytest.raises(grpc.aio.AbortError):
            await (await guarded(QueueFullError("full"))).unary_unary(None, Context())  # type: ignore[misc]
        assert len(caplog.records) == num_lines
    assert "/a/b QUEUE_FULL" in caplog.messages[0]
