"""Turns errors of servicers into statuses, for every method."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from genserve.observe.log_lines import note
from genserve.observe.trace import keep_headers
from genserve.rpc.handlers import Context, Continuation, Handler, WrappedHandlers, behavior_of, with_behavior
from genserve.rpc.status import known_error, to_status

log = logging.getLogger(__name__)

Behavior = Callable[[Any, Any], Awaitable[Any]]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raised with the status of the error. Only for handlers that are coroutines: those of
    gRPC's own services that are not raise nothing."""

    def __init__(self) -> None:
        self._guarded = WrappedHandlers(_guarded_handler)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """The handler of a method, guarded."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._guarded.of(handler, handler_call_details.method)


def _guarded_handler(handler: Handler, method: str) -> Handler:
    behavior = behavior_of(handler)
    if not inspect.iscoroutinefunction(behavior):
        return handler
    deserializer = handler.request_deserializer
    if deserializer is not None and not handler.request_streaming:
        deserializer = _read_or_error(deserializer)
    return with_behavior(handler, _guarded_behavior(behavior, method), deserializer)


def _read_or_error(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives what is no message as its error to the handler: gRPC would log it as an error of ours, and end the call as
    UNKNOWN. Streams read their messages themselves."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return error

    return read


def _guarded_behavior(behavior: Behavior, method: str) -> Behavior:
    async def guarded(request: Any, context: Context) -> Any:
        note(method=method)
        keep_headers(context.invocation_metadata() or (), unless_known=True)  # whoever traces calls has set them
        started_s = time.monotonic()
        outcome = "CANCELLED"
        try:
            if isinstance(request, DecodeError):
                raise request
            response = await behavior(request, context)
            outcome = "OK"
            return response
        except grpc.aio.AbortError:
            outcome = "aborted"
            raise
        except grpc.aio.InternalError as error:
            # A write to, or read from, a client that is gone.
            raise asyncio.CancelledError("the client is gone") from error
        except Exception as error:
            status, outcome = status_of(error, method)
        finally:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s %s %.3f s", method, outcome, time.monotonic() - started_s)
        # The error is gone here. In a local, or as the context of the one that gRPC raises and keeps, it would keep the
        # frames of its traceback until the garbage collector comes by: a large frame of a push, open files.
        await context.abort_with_status(status)

    return guarded


def status_of(error: Exception, method: str) -> tuple[Any, str]:
    """The status of an error, and its reason."""
    known = known_error(error, method)
    try:
        return to_status(known), known.reason
    finally:
        del known, error
