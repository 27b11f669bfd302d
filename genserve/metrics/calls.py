"""Counts calls by method and status, as other gRPC servers do: `grpc_server_*`.

One increment when a call begins, and two when it ends; messages are not counted, because there is one for each token.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Histogram

from genserve.rpc.interceptor import KINDS

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_TYPES = {(False, False): "unary", (False, True): "server_stream", (True, False): "client_stream"}
_BIDI = "bidi_stream"
_UNKNOWN = "unknown"
_METHOD = ("grpc_service", "grpc_method", "grpc_type")
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Method:
    """What the labels say of a method."""

    service: str
    name: str
    type: str

    @property
    def labels(self) -> tuple[str, str, str]:
        """The values of `_METHOD`."""
        return self.service, self.name, self.type


UNKNOWN = Method(_UNKNOWN, _UNKNOWN, _UNKNOWN)
"""Any method that the server does not have: its name is up to the client, so it is no label."""


class CallSeries:
    """The series of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("grpc_server_started", "Calls that have begun.", _METHOD, registry=registry)
        self._handled = Counter(
            "grpc_server_handled", "Calls that have ended, by status.", (*_METHOD, "grpc_code"), registry=registry
        )
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from the beginning of a call to its end, those of a stream included.",
            _METHOD,
            registry=registry,
            buckets=_BOUNDS_S,
        )
        # The children, which prometheus_client would look up under a lock.
        self.started = lru_cache(maxsize=None)(lambda method: self._started.labels(*method.labels))
        self.seconds = lru_cache(maxsize=None)(lambda method: self._seconds.labels(*method.labels))
        self.handled = lru_cache(maxsize=None)(lambda method, code: self._handled.labels(*method.labels, code))

    def begun(self, method: Method) -> float:
        """A call begins. Returns when, for `ended`."""
        self.started(method).inc()
        return time.monotonic()

    def ended(self, method: Method, began_s: float, code: str) -> None:
        """It has ended with the name of a status."""
        self.handled(method, code).inc()
        self.seconds(method).observe(time.monotonic() - began_s)


class CallCounts(grpc.aio.ServerInterceptor):
    """Counts the calls of a server. Put it first, so that what other interceptors refuse counts too. `renamed`: methods
    that stand for another one's calls, by their paths."""

    def __init__(self, series: CallSeries, renamed: Mapping[str, Method] | None = None) -> None:
        self._series = series
        self._renamed = {} if renamed is None else renamed
        self._counting: dict[str, tuple[Handler, Handler]] = {}  # by method; as many as the server has

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The handler of a method, with the counts."""
        path = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC reports an unknown method
            self._series.ended(UNKNOWN, self._series.begun(UNKNOWN), "UNIMPLEMENTED")
            return None
        known = self._counting.get(path)
        if known is None or known[0] is not handler:
            known = self._counting[path] = handler, self._counted(handler, path)
        return known[1]

    def _counted(self, handler: Handler, path: str) -> Handler:
        streams = bool(handler.request_streaming), bool(handler.response_streaming)
        kind, make = KINDS[streams]
        behavior = getattr(handler, kind)
        _, service, name = path.split("/", 2)
        method = self._renamed.get(path, Method(service, name, _TYPES.get(streams, _BIDI)))
        is_coroutine = inspect.iscoroutinefunction(behavior)
        counted = _counted_call if is_coroutine else _counted_generator
        if not is_coroutine and not inspect.isasyncgenfunction(behavior):
            return handler  # gRPC runs it in a thread: reflection, of an older version
        made: Handler = make(
            counted(behavior, method, self._series),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


def _counted_call(behavior: Any, method: Method, series: CallSeries) -> Any:
    async def counted(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        began_s = series.begun(method)
        code = "UNKNOWN"
        try:
            response = await behavior(request, context)
            code = code_of(context)
            return response
        except grpc.aio.AbortError:
            code = code_of(context)
            raise
        except asyncio.CancelledError:
            code = _cancelled(context)
            raise
        finally:
            series.ended(method, began_s, code)

    return counted


def _counted_generator(behavior: Any, method: Method, series: CallSeries) -> Any:
    async def counted(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        began_s = series.begun(method)
        code = "UNKNOWN"
        try:
            async for response in behavior(request, context):
                yield response
            code = code_of(context)
        except (asyncio.CancelledError, GeneratorExit):
            code = _cancelled(context)
            raise
        finally:
            series.ended(method, began_s, code)

    return counted


def code_of(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    """The name of the status that a handler has set."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code, "UNKNOWN") if code else "OK"


def _cancelled(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    left_s = context.time_remaining()
    return "CANCELLED" if left_s is None or left_s > 0 else "DEADLINE_EXCEEDED"
