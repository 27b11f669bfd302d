"""The way of a call to its servicer: which handler serves it, whether its router may make it, and how it ends if an
error is raised."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from genserve.control.membership import Membership
from genserve.errors import FleetHeldError
from genserve.observe.log_lines import METHOD
from genserve.observe.trace import TRACEPARENT, keep_headers
from genserve.rpc.handlers import Context, Handler, behavior_of, refusing, with_behavior
from genserve.rpc.status import known_error, to_status
from genserve.wire.literals import ROUTER_ID_KEY

log = logging.getLogger(__name__)

Behavior = Callable[[Any, Any], Awaitable[Any]]

_BEFORE_WATCHING: Final = frozenset(
    {"/genserve.v1.ControlService/WatchStatus", "/genserve.v1.ControlService/GetServerInfo"}
)


class ServiceTable(grpc.GenericRpcHandler):
    """The handlers of all methods of a server, by their paths. An error of a handler ends its call with the status of
    the error.

    Takes handlers as a server does, of which the one that was added last is used. gRPC's servers take them only before
    they start, so they get this table, whose handlers can be exchanged at any time.
    """

    def __init__(self, membership: Membership | None = None) -> None:
        """`membership`: refuses calls of routers that do not look after this daemon any more; None = takes all."""
        self._membership = membership
        self._handlers: dict[str, Handler] = {}

    @property
    def as_server(self) -> grpc.aio.Server:
        """For functions that add services, which only know servers."""
        return cast(grpc.aio.Server, self)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As grpc.aio.Server has it."""
        for name, handler in method_handlers.items():
            path = f"/{service_name}/{name}"
            self._handlers[path] = _guarded(handler, path, self._membership)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As grpc.aio.Server has it. Adds nothing: generated code calls both functions for each service."""

    def become(self, table: "ServiceTable") -> None:
        """Calls find their handlers in `table` from now on. Running calls keep theirs."""
        self._handlers = table._handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """The handler of a method, or one that refuses; None if there is none, which whoever counts calls would count
        by the name that the client has given. gRPC asks for each call."""
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is not None and self._membership is not None and method not in _BEFORE_WATCHING:
            router_id = dict(handler_call_details.invocation_metadata or ()).get(ROUTER_ID_KEY)
            try:
                if router_id:
                    self._membership.check(str(router_id))
            except FleetHeldError as error:
                return refusing(error)
        return handler


def router_id_of(context: Context) -> str:
    """The run of a router that a call comes from; "" = no router."""
    return str(dict(context.invocation_metadata() or ()).get(ROUTER_ID_KEY, ""))


def _guarded(handler: Handler, method: str, membership: Membership | None) -> Handler:
    """The handler, whose errors end its calls with a status. Those of gRPC's own services that are no coroutines raise
    nothing, and stay as they are."""
    behavior = behavior_of(handler)
    if not inspect.iscoroutinefunction(behavior):
        return handler
    deserializer = handler.request_deserializer
    if deserializer is not None and not handler.request_streaming:
        deserializer = _read_or_error(deserializer)
    return with_behavior(handler, _guarded_behavior(behavior, method, membership), deserializer)


def _read_or_error(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives what is no message as its error to the handler: gRPC would log it as an error of ours, and end the call as
    UNKNOWN. Streams read their messages themselves."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return error

    return read


def _guarded_behavior(behavior: Behavior, method: str, membership: Membership | None) -> Behavior:
    async def guarded(request: Any, context: Context) -> Any:
        METHOD.set(method)
        metadata = context.invocation_metadata() or ()
        named = dict(metadata)
        if TRACEPARENT in named:
            keep_headers(metadata, unless_known=True)  # whoever traces calls has set them
        if membership is not None and ROUTER_ID_KEY in named:  # here and not where it is found: the caller is known
            membership.heard(str(named[ROUTER_ID_KEY]))
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
            status, outcome = _status_of(error, method)
        finally:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s %s %.3f s", method, outcome, time.monotonic() - started_s)
        # The error is gone here. In a local, or as the context of the one that gRPC raises and keeps, it would keep the
        # frames of its traceback until the garbage collector comes by: a large frame of a push, open files.
        await context.abort_with_status(status)

    return guarded


def _status_of(error: Exception, method: str) -> tuple[Any, str]:
    """The status of an error, and its reason."""
    known = known_error(error, method)
    try:
        return to_status(known), known.reason
    finally:
        del known, error
