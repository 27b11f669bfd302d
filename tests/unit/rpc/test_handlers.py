"""Handlers that interceptors make of those of the server."""

import grpc
import pytest

from genserve.rpc.handlers import Handler, WrappedHandlers, behavior_of, with_behavior


def handler() -> Handler:
    return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


def test_a_handler_is_wrapped_once_until_its_method_has_another() -> None:
    """A daemon has other handlers once its engine is there."""
    wrapped: list[tuple[Handler, str]] = []

    def wrap(original: Handler, method: str) -> Handler:
        wrapped.append((original, method))
        return handler()

    handlers, starting, serving = WrappedHandlers(wrap), handler(), handler()
    first = handlers.of(starting, "/s/m")
    assert first is not starting
    assert handlers.of(starting, "/s/m") is first
    assert handlers.of(starting, "/s/n") is not first
    assert handlers.of(serving, "/s/m") is not first
    assert wrapped == [(starting, "/s/m"), (starting, "/s/n"), (serving, "/s/m")]


@pytest.mark.parametrize(
    "make",
    [
        grpc.unary_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
        grpc.stream_unary_rpc_method_handler,
        grpc.stream_stream_rpc_method_handler,
    ],
)
def test_only_the_behavior_is_another(make: "type[Handler]") -> None:
    """Kind and codecs are those of before, except for a deserializer that is given."""
    original: Handler = make(max, request_deserializer=bytes, response_serializer=repr)  # type: ignore[call-arg]
    changed = with_behavior(original, min)
    assert (behavior_of(original), behavior_of(changed)) == (max, min)
    assert changed.request_streaming is original.request_streaming
    assert changed.response_streaming is original.response_streaming
    assert (changed.request_deserializer, changed.response_serializer) == (bytes, repr)
    assert with_behavior(original, min, str).request_deserializer is str
