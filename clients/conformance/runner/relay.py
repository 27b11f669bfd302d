"""A gRPC server that passes every call on to a daemon, and changes a message on its way."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from genserve.v1 import generation_pb2, weights_pb2

_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_DETAILS = "grpc-status-details-bin"
_GENERATE, _MANY = "/genserve.v1.GenerationService/Generate", "/genserve.v1.GenerationService/GenerateMany"
_PUSH = "/genserve.v1.WeightService/PushWeights"


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of requests, responses and error details, each as bytes; of a method for the first two."""

    request: Callable[[str, bytes], bytes] = lambda _, message: message
    response: Callable[[str, bytes], bytes] = lambda _, message: message
    details: Callable[[bytes], bytes] = lambda details: details


class Relay(grpc.GenericRpcHandler):
    """Listens at `address` while it is entered."""

    def __init__(self, target: str, change: Change) -> None:
        self._target = target
        self._change = change
        self._stack = AsyncExitStack()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self._target, _UNLIMITED))
        server = grpc.aio.server(options=_UNLIMITED)
        server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def service(self, details: Any) -> Any:
        """Any method, as streams of bytes."""
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async def changed() -> AsyncIterator[bytes]:
                async for request in requests:
                    yield self._change.request(method, request)

            metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith("user-agent")]
            call: Any = self._channel.stream_stream(method)(
                changed(), timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for response in call:
                    yield self._change.response(method, response)
            except grpc.aio.AioRpcError as error:
                trailers = [
                    (key, self._change.details(value) if key == _DETAILS else value)
                    for key, value in error.trailing_metadata() or ()
                ]
                context.set_trailing_metadata(trailers)
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)


class CorruptChunk:
    """Changes a byte in chunk `number` of a push, once."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.is_done = False

    def change(self) -> Change:
        """For a relay."""
        return Change(request=self._request)

    def _request(self, method: str, message: bytes) -> bytes:
        if method != _PUSH or self.is_done:
            return message
        request = weights_pb2.PushWeightsRequest.FromString(message)
        if not request.HasField("chunk"):
            return message
        self._left -= 1
        if self._left >= 0:
            return message
        self.is_done = True
        data = bytearray(request.chunk.data)
        data[len(data) // 2] ^= 1
        request.chunk.data = bytes(data)
        return request.SerializeToString()


def _wrong_field(response: Any) -> None:
    if response.HasField("usage"):
        response.usage.num_output_tokens += 1


def _wrong_span(response: Any) -> None:
    for output in response.outputs:
        if output.HasField("finish"):
            for span in (*output.weight_spans[-1:], *output.finish.weight_spans[-1:]):
                span.end += 1


def _in_generations(change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def changed(method: str, message: bytes) -> bytes:
        if method == _GENERATE:
            response = generation_pb2.GenerateResponse.FromString(message)
            change(response)
            return response.SerializeToString()
        if method == _MANY:
            many = generation_pb2.GenerateManyResponse.FromString(message)
            for item in many.items:
                change(item.response)
            return many.SerializeToString()
        return message

    return changed


def _wrong_reason(details: bytes) -> bytes:
    status = status_pb2.Status.FromString(details)
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            info.reason = {"WEIGHT_VERSION_MISMATCH": "VERSION_NOT_NEWER"}.get(info.reason, info.reason)
            detail.Pack(info)
    return bytes(status.SerializeToString())


MUTATIONS = {
    "field": Change(response=_in_generations(_wrong_field)),
    "reason": Change(details=_wrong_reason),
    "span": Change(response=_in_generations(_wrong_span)),
}
"""Mistakes of a daemon, by name: a field is wrong, a reason is another one, a span ends one token late. The table must
show each."""
