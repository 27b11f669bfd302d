"""Handlers of methods, as gRPC has them: made of descriptors, and made of other handlers by interceptors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Never, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from genserve.errors import GenserveError
from genserve.rpc.status import to_status

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
"""Gives an interceptor the handler of a method; None if the server has no such method, which gRPC reports."""

_KINDS: Final[dict[tuple[bool, bool], tuple[str, Callable[..., Any]]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""(requests stream, responses stream) -> the attribute of a handler with its behavior, and the function that makes a
handler."""


def method_handler(
    method: MethodDescriptor, behavior: Callable[..., Any], request_deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """The handler of a method. `request_deserializer`: default: what the generated code uses."""
    _, make = _KINDS[method.client_streaming, method.server_streaming]
    handler: Handler = make(
        behavior,
        request_deserializer=request_deserializer or GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )
    return handler


def behavior_of(handler: Handler) -> Any:
    """The function that serves the calls of a handler."""
    kind, _ = _kind_of(handler)
    return getattr(handler, kind)


def with_behavior(
    handler: Handler, behavior: Callable[..., Any], request_deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """The same handler with another behavior. `request_deserializer`: default: that of `handler`."""
    _, make = _kind_of(handler)
    made: Handler = make(
        behavior,
        request_deserializer=request_deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def refusing(error: GenserveError) -> Handler:
    """Ends a call of any kind with an error, without reading its messages."""

    async def refuse(requests: AsyncIterator[Any], context: Context) -> Never:
        await context.abort_with_status(to_status(error))
        raise asyncio.CancelledError  # not reached: the call has ended

    handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler


class WrappedHandlers:
    """Handlers that an interceptor puts in place of those of the server. `wrap` makes one, from a handler and the
    name of its method; it is kept until the method gets another handler, as when the engine of a daemon is there."""

    def __init__(self, wrap: Callable[[Handler, str], Handler]) -> None:
        self._wrap = wrap
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # by method, of which a server has a fixed number

    def of(self, handler: Handler, method: str) -> Handler:
        """The handler, wrapped."""
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, self._wrap(handler, method)
        return known[1]


def _kind_of(handler: Handler) -> tuple[str, Callable[..., Any]]:
    return _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
