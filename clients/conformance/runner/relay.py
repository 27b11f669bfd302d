"""A gRPC server that passes every call on to a daemon, and changes a message on its way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from genserve.transport.streams import FinalStatus

_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_DETAILS = "grpc-status-details-bin"
_BROKEN = "Socket closed"


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of requests, responses and error details, each as bytes; of a method for the first two. Instead of a
    response of None the call ends, with OK."""

    request: Callable[[str, bytes], bytes] = lambda _, message: message
    response: Callable[[str, bytes], bytes | None] = lambda _, message: message
    details: Callable[[bytes], bytes] = lambda details: details


class Relay(grpc.GenericRpcHandler):
    """Listens at `address` while it is entered."""

    def __init__(
        self,
        target: str,
        change: Change = Change(),
        *,
        began: Callable[[str, float | None], None] = lambda *_: None,
        saw: Callable[[str, Any, bytes], None] = lambda *_: None,
        ended: Callable[[bool], None] = lambda _: None,
        refuses: Callable[[str], bool] = lambda _: False,
        breaks: Callable[[str, bytes], bool] = lambda *_: False,
        broken: Callable[[], Awaitable[None]] | None = None,
        held_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """`began` is called with each call's method and the time that its client gives it, in seconds; `saw` with
        each request, its method, and the context that is one call's alone; `ended` at the end of the call, with
        whether the client has cancelled it. A call that `refuses` never reaches the daemon. One of which a
        request `breaks` it is broken off at both ends, without that request, and `broken` is called between them.
        `held_s`, of how many responses of its call have passed, is how long the next one is held back, in seconds."""
        self._target = target
        self._change = change
        self._began = began
        self._saw = saw
        self._ended = ended
        self._refuses = refuses
        self._breaks = breaks
        self._broken = broken
        self._held_s = held_s
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
            is_broken = False

            async def changed() -> AsyncIterator[bytes]:
                nonlocal is_broken
                async for request in requests:
                    self._saw(method, context, request)
                    if self._breaks(method, request):
                        is_broken = True
                        call.cancel()
                        return
                    yield self._change.request(method, request)

            if self._refuses(method):
                await context.abort(grpc.StatusCode.UNAVAILABLE, _BROKEN)
            remaining_s = context.time_remaining()
            self._began(method, remaining_s)
            metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith("user-agent")]
            stub: Any = self._channel.stream_stream(method)
            call = stub(changed(), timeout=remaining_s, metadata=metadata)
            status, responses = FinalStatus(call), aiter(call)
            num_passed = 0
            try:
                while (response := await status.of(_next(responses))) is not None:
                    if (passed_on := self._change.response(method, response)) is None:
                        break
                    await asyncio.sleep(self._held_s(num_passed))
                    yield passed_on
                    num_passed += 1
                self._ended(False)
            except asyncio.CancelledError:
                self._ended(not is_broken)
                if not is_broken:
                    raise
                if self._broken is not None:
                    await self._broken()
                await context.abort(grpc.StatusCode.UNAVAILABLE, _BROKEN)
            except grpc.aio.AioRpcError as error:
                trailers = [
                    (key, self._change.details(value) if key == _DETAILS and isinstance(value, bytes) else value)
                    for key, value in error.trailing_metadata() or ()
                ]
                self._ended(False)
                context.set_trailing_metadata(trailers)
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)


async def _next(responses: AsyncIterator[bytes]) -> bytes | None:
    return await anext(responses, None)
