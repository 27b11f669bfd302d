"""Tells observers when a call begins and with which status it ends: for those who count calls, or trace them."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import Default

from genserve.ingest import relay as ingest_relay
from genserve.rpc.handlers import Context, Continuation, Handler, WrappedHandlers, behavior_of, with_behavior

_TYPES = {(False, False): "unary", (False, True): "server_stream", (True, False): "client_stream"}
_BIDI = "bidi_stream"
_UNKNOWN = "unknown"
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a server, and whether its messages are streams."""

    service: str
    name: str
    type: str


UNKNOWN = Method(_UNKNOWN, _UNKNOWN, _UNKNOWN)
"""Any method that the server does not have: its name is up to the client."""
RELAYED = {
    f"/{ingest_relay.SERVICE}/{ingest_relay.METHOD}": Method(
        "genserve.v1.WeightService", "PushWeights", "client_stream"
    )
}
"""A call that a receiving process has passed on is the one that its client has made."""


class CallObserver(Protocol):
    """Gets each call when it begins."""

    def begun(self, method: Method, context: "Context | None") -> Callable[[str], None]:
        """A call begins, in the task of its handler. What is returned is called with the name of its status when it
        ends. `context` is None for a method that the server does not have."""


class ObservedCalls(grpc.aio.ServerInterceptor):
    """Put it first, so that it sees what other interceptors refuse. `renamed`: methods that stand for another one's
    calls, by their paths."""

    def __init__(self, observers: Sequence[CallObserver], renamed: Mapping[str, Method] = RELAYED) -> None:
        self._observers = tuple(observers)
        self._renamed = renamed
        self._observed = WrappedHandlers(self._observing)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """The handler of a method, observed."""
        handler = await continuation(handler_call_details)
        if handler is None:
            for end in [each.begun(UNKNOWN, None) for each in self._observers]:
                end("UNIMPLEMENTED")
            return None
        return self._observed.of(handler, handler_call_details.method)

    def _observing(self, handler: Handler, path: str) -> Handler:
        behavior, method = behavior_of(handler), self._renamed.get(path) or _method_of(handler, path)
        if inspect.iscoroutinefunction(behavior):
            observed = _observed_call(behavior, method, self._observers)
        elif inspect.isasyncgenfunction(behavior):
            observed = _observed_generator(behavior, method, self._observers)
        else:
            return handler  # gRPC runs it in a thread
        return with_behavior(handler, observed)


def _method_of(handler: Handler, path: str) -> Method:
    """The method as its proto file has it: a handler that refuses takes streams, whatever the method does."""
    _, service, name = path.split("/", 2)
    streams = bool(handler.request_streaming), bool(handler.response_streaming)
    with suppress(KeyError):  # there is no proto file
        described = Default().FindMethodByName(f"{service}.{name}")
        streams = described.client_streaming, described.server_streaming
    return Method(service, name, _TYPES.get(streams, _BIDI))


def _observed_call(behavior: Any, method: Method, observers: Sequence[CallObserver]) -> Any:
    async def observed(request: Any, context: Context) -> Any:
        with _told(method, context, observers):
            return await behavior(request, context)

    return observed


def _observed_generator(behavior: Any, method: Method, observers: Sequence[CallObserver]) -> Any:
    async def observed(request: Any, context: Context) -> Any:
        with _told(method, context, observers):
            async for response in behavior(request, context):
                yield response

    return observed


@contextmanager
def _told(method: Method, context: Context, observers: Sequence[CallObserver]) -> Iterator[None]:
    """Reports the beginning and the end of a call, which is the block, to the observers."""
    ends = [each.begun(method, context) for each in observers]
    code = "UNKNOWN"
    try:
        yield
        code = code_of(context)
    except grpc.aio.AbortError:
        code = code_of(context)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        code = _cancelled(context)
        raise
    finally:
        for end in ends:
            end(code)


_DEADLINE_SLACK_S: Final = 0.1
"""The time of a call begins at the server when the call arrives, and is rounded up: a client whose time is over cancels
the call a moment before the server would."""


def code_of(context: Context) -> str:
    """The name of the status that a handler has set."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code, "UNKNOWN") if code else "OK"


def _cancelled(context: Context) -> str:
    left_s = context.time_remaining()
    return "CANCELLED" if left_s is None or left_s > _DEADLINE_SLACK_S else "DEADLINE_EXCEEDED"
