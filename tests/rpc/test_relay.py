"""What a receiving process does to its call to the daemon, which is played here."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2

from genserve.ingest.relay import FAILED, METHOD, OUTCOME, SERVICE, Relay
from tests.support.answers import answer_of
from tests.support.patience import STEP_S, until


async def served(service: str, method: str, handler: "grpc.RpcMethodHandler[bytes, bytes]") -> tuple[Any, str]:
    """A server of one method, and its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("fails", [False, True])
async def test_the_call_to_the_daemon_is_not_cancelled_after_its_answer(fails: bool) -> None:
    """Or the daemon counts a push that was applied, or refused, as one that somebody cancelled. The trainer goes on
    sending, and gets what the daemon answers."""
    failure = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message="truncated")
    ends: asyncio.Queue[str] = asyncio.Queue()
    answered, goes_on = asyncio.Event(), asyncio.Event()

    async def daemon(frames: AsyncIterator[bytes], context: Any) -> None:
        try:
            await anext(aiter(frames))
            await context.write(FAILED + failure.SerializeToString() if fails else OUTCOME + b"applied")
            answered.set()
            await goes_on.wait()
        except asyncio.CancelledError:
            ends.put_nowait("cancelled")
            raise
        ends.put_nowait("done")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b""
            await asyncio.sleep(0.01)

    inner, inner_address = await served(SERVICE, METHOD, grpc.stream_stream_rpc_method_handler(daemon))
    async with grpc.aio.insecure_channel(inner_address) as to_daemon:
        relay = Relay(to_daemon, asks=False)
        outer, address = await served("s", "Push", grpc.stream_unary_rpc_method_handler(relay.push_weights))
        async with grpc.aio.insecure_channel(address) as channel:
            push: Any = channel.stream_unary("/s/Push")
            pushing = asyncio.ensure_future(answer_of(push(endless(), timeout=30)))
            await until(answered.is_set)
            for _ in range(2):  # comes back after the answer, and then to the daemon after a cancellation
                with pytest.raises(grpc.aio.AioRpcError):
                    await to_daemon.unary_unary("/s/Unknown")(b"")
            goes_on.set()
            if fails:
                with pytest.raises(grpc.aio.AioRpcError, match="truncated") as caught:
                    await pushing
                assert caught.value.code() is grpc.StatusCode.ABORTED
            else:
                assert await pushing == b"applied"
        assert await asyncio.wait_for(ends.get(), STEP_S) == "done"
        await outer.stop(None)
    await inner.stop(None)
