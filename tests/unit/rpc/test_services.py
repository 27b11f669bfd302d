"""Which handler serves a call, and what an error of it does, whatever the timing."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from genserve.errors import QueueFullError
from genserve.rpc.handlers import Handler
from genserve.rpc.services import ServiceTable


class Context:
    """A call that remembers the status with which it was ended."""

    status: Any = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort_with_status(self, status: Any) -> None:
        self.status = status
        raise grpc.aio.AbortError


def served(behavior: Callable[..., Any]) -> Handler:
    """The handler of /a/b that a server finds in its table."""
    table = ServiceTable()
    table.add_registered_method_handlers("a", {"b": grpc.unary_unary_rpc_method_handler(behavior)})
    handler = found(table)
    assert handler is not None
    return handler


def found(table: ServiceTable) -> "Handler | None":
    """The handler of /a/b."""
    return table.service(SimpleNamespace(method="/a/b", invocation_metadata=()))  # type: ignore[arg-type]


def guarded(raised: BaseException) -> Handler:
    """A handler that raises, as the server would call it."""

    async def behavior(request: object, context: Context) -> None:
        raise raised

    return served(behavior)


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), grpc.aio.InternalError("ExecuteBatchError")])
async def test_a_client_that_has_gone_is_a_cancellation_and_no_error(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC raises one or the other at a write, as the race goes; neither may be answered or logged as our error."""
    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await guarded(raised).unary_unary(None, context)  # type: ignore[misc]
    assert context.status is None
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_handler_that_has_ended_its_call_itself_is_left_alone() -> None:
    """Its status stands."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await guarded(grpc.aio.AbortError()).unary_unary(None, context)  # type: ignore[misc]
    assert context.status is None


async def test_an_error_of_ours_becomes_its_status() -> None:
    """And the call is ended with it, not with an answer."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await guarded(QueueFullError("full")).unary_unary(None, context)  # type: ignore[misc]
    assert context.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_nothing_keeps_what_a_handler_that_failed_has_held() -> None:
    """gRPC keeps the error that ends a call: it must not lead to the handler's frames."""
    known: list[weakref.ref[Context]] = []

    async def behavior(request: object, context: Context) -> None:
        held = Context()
        known.append(weakref.ref(held))
        raise QueueFullError("full") from ValueError("why")

    handler = served(behavior)
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
            await guarded(QueueFullError("full")).unary_unary(None, Context())  # type: ignore[misc]
        assert len(caplog.records) == num_lines
    assert "/a/b QUEUE_FULL" in caplog.messages[0]


def test_a_table_that_becomes_another_one_serves_the_methods_of_that_one() -> None:
    """A daemon has other methods once its engine is there; its server has started before."""
    table, later, empty = ServiceTable(), ServiceTable(), ServiceTable()
    for each in (table, later):
        each.add_registered_method_handlers("a", {"b": grpc.unary_unary_rpc_method_handler(repr)})
    first = found(table)
    assert first is not None and found(table) is first
    table.become(later)
    assert found(table) is found(later) is not first
    table.become(empty)
    assert found(table) is None
