"""Calls by method and status, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from genserve.errors import QueueFullError
from genserve.metrics.process import CallSeries
from genserve.rpc.observed import Method, ObservedCalls
from genserve.rpc.services import ServiceTable
from tests.support.answers import answer_of
from tests.support.patience import until

Sample = Callable[..., float]
_KINDS = {
    "unary": grpc.unary_unary_rpc_method_handler,
    "server_stream": grpc.unary_stream_rpc_method_handler,
    "client_stream": grpc.stream_unary_rpc_method_handler,
    "bidi_stream": grpc.stream_stream_rpc_method_handler,
}


@asynccontextmanager
async def counted(
    kind: str, behavior: Any, renamed: Method | None = None
) -> AsyncIterator[tuple[grpc.aio.Channel, Sample]]:
    """A server with the method /s/m; the second one tells how often it was started, or handled with a code."""
    registry = CollectorRegistry()
    observed = ObservedCalls([CallSeries(registry)], {} if renamed is None else {"/s/m": renamed})
    server, table = grpc.aio.server(interceptors=[observed]), ServiceTable()
    table.add_registered_method_handlers("s", {"m": _KINDS[kind](behavior)})
    server.add_generic_rpc_handlers((table,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def sample(service: str = "s", name: str = "m", type: str = kind, *, code: str = "", what: str = "") -> float:
        labels = {"grpc_service": service, "grpc_method": name, "grpc_type": type}
        if what:
            return registry.get_sample_value(f"grpc_server_handling_seconds_{what}", labels) or 0.0
        if code:
            return registry.get_sample_value("grpc_server_handled_total", {**labels, "grpc_code": code}) or 0.0
        return registry.get_sample_value("grpc_server_started_total", labels) or 0.0

    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, sample
    finally:
        await server.stop(0)


async def test_a_call_counts_when_it_begins_and_with_its_status_when_it_ends() -> None:
    """A stream of any length is one call."""
    go_on = asyncio.Event()

    async def behavior(request: bytes, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")
        await go_on.wait()

    async with counted("server_stream", behavior) as (channel, sample):
        call = channel.unary_stream("/s/m")(b"")
        assert await call.read() == b"1"
        assert (sample(), sample(code="OK"), sample(what="count")) == (1, 0, 0)
        go_on.set()
        assert (await call.read(), await call.read()) == (b"2", grpc.aio.EOF)
        await until(lambda: sample(what="count") == 1)
        assert (sample(), sample(code="OK")) == (1, 1)


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFullError("x", retry_after_s=1.0), "RESOURCE_EXHAUSTED"), (KeyError("x"), "INTERNAL")]
)
async def test_an_error_counts_as_the_status_that_the_client_gets(error: Exception, code: str) -> None:
    """Also one that nobody expected."""

    async def behavior(request: bytes, context: Any) -> bytes:
        raise error

    async with counted("unary", behavior) as (channel, sample):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/s/m")(b"")
        assert refused.value.code().name == code
        await until(lambda: sample(code=code) == 1)


async def test_a_call_that_the_client_ends_counts_as_cancelled() -> None:
    """It is no error of the server's."""

    async def behavior(requests: Any, context: Any) -> None:
        await context.write(b"")
        await asyncio.Event().wait()

    async with counted("bidi_stream", behavior) as (channel, sample):
        call = channel.stream_stream("/s/m")()
        await call.read()
        call.cancel()
        await until(lambda: sample(code="CANCELLED") == 1)


@pytest.mark.parametrize(("timeout_s", "cancels", "code"), [(2.5, False, "DEADLINE_EXCEEDED"), (60, True, "CANCELLED")])
async def test_a_call_whose_time_is_over_is_told_from_one_that_was_given_up(
    timeout_s: float, cancels: bool, code: str
) -> None:
    """gRPC cancels the handler of either."""

    async def behavior(requests: Any, context: Any) -> None:
        await context.write(b"")
        await asyncio.Event().wait()

    async with counted("bidi_stream", behavior) as (channel, sample):
        call = channel.stream_stream("/s/m")(timeout=timeout_s)
        await call.read()
        if cancels:
            call.cancel()
        await until(lambda: sample(what="count") == 1)
        assert sample(code=code) == 1


@pytest.mark.slow
async def test_call_ended_by_its_client_just_before_the_deadline_counts_as_late() -> None:
    """Of 200 calls a few have up to 12 ms left at the server when their client's time is over."""
    num_arrived = 0

    async def behavior(requests: Any, context: Any) -> None:
        nonlocal num_arrived
        num_arrived += 1
        await context.write(b"")
        await asyncio.Event().wait()

    async with counted("bidi_stream", behavior) as (channel, sample):
        while not num_arrived:
            # On a busy machine the time of some is over before they reach the server, which then never hears of them,
            # and of all if it stands still.
            calls = [channel.stream_stream("/s/m")(timeout=0.5 + 0.003 * number) for number in range(200)]
            await asyncio.gather(*(call.code() for call in calls))
        await until(lambda: sample(what="count") == num_arrived)
        assert sample(code="DEADLINE_EXCEEDED") == num_arrived


async def test_a_method_that_does_not_exist_is_no_label() -> None:
    """Its name is up to the client, and each would stay a series for ever."""

    async def behavior(request: bytes, context: Any) -> bytes:
        return b""

    async with counted("unary", behavior) as (channel, sample):
        for name in ("/s/other", "/other/m"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(name)(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert sample("unknown", "unknown", "unknown", code="UNIMPLEMENTED") == 2
        assert sample() == sample("s", "other") == sample("other", "m") == 0


async def test_generators_count_and_relayed_calls_have_their_own_name() -> None:
    """Reflection is a generator, and a receiving process passes on what its clients have called."""

    async def behavior(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"1"

    renamed = Method("genserve.v1.WeightService", "PushWeights", "client_stream")
    async with counted("bidi_stream", behavior, renamed=renamed) as (channel, sample):
        assert [each async for each in channel.stream_stream("/s/m")(iter([b""]))] == [b"1"]
        await until(lambda: sample(renamed.service, renamed.name, renamed.type, code="OK") == 1)
        assert sample(code="OK") == 0


async def test_a_generator_that_ends_its_call_counts_with_its_status() -> None:
    """As reflection does for a caller whose certificate is not listed."""

    async def behavior(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "x")
        yield b"1"

    async with counted("bidi_stream", behavior) as (channel, sample):
        call = channel.stream_stream("/s/m")(iter([b""]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer_of(call, call.read())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await until(lambda: sample(what="count") == 1)
        assert sample(code="UNAUTHENTICATED") == 1
