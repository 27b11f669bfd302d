"""A call whose time is over while the engine is paused: over the wire, and in the client."""

import asyncio
from collections.abc import Awaitable, Sequence

import grpc
from google.rpc import error_details_pb2

from genserve.client import AsyncClient
from genserve.errors import DeadlineError
from genserve.v1 import generation_pb2
from tests.support.lateness import explained_errors
from tests.support.patience import SCALE
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, detail_of, reason_of, update

TIMEOUT_S = 3.0 * SCALE
SHORT_S = 0.3


async def test_error_of_a_request_to_a_paused_engine_names_the_holder(daemon: Daemon) -> None:
    """With one request, and with many on one stream; and whether or not it had tokens before."""
    async with AsyncClient(daemon.address) as client:
        leases = []

        async def calls(timeout_s: float) -> Sequence[Awaitable[object]]:
            if leases:
                await client.resume(leases.pop().lease_id)
            num_streams = len(daemon.engine.streams)
            begun = asyncio.create_task(client.generate("begun", timeout_s=timeout_s, stream_interval=1))
            (await daemon.stream(num_streams)).put(update(7, first=True))
            leases.append((await client.pause(holder="alice@host", ttl_s=600)).lease)
            waiting = [client.generate("a", timeout_s=timeout_s), client.generate_many(["b", "c"], timeout_s=timeout_s)]
            return [begun, *waiting]

        for error in await explained_errors(calls, TIMEOUT_S):
            assert isinstance(error, DeadlineError), error
            assert "paused by alice@host" in error.message and "s left" in error.message
            assert f"genserve resume {leases[0].lease_id}" in error.message
            assert error.metadata.keys() == {"phase", "holder", "lease_id", "left_s"}
            assert 500 < int(error.metadata["left_s"]) <= 600
        await asyncio.gather(*(stream.closed.wait() for stream in daemon.engine.streams))


async def test_the_wire_tells_it_as_details(daemon: Daemon) -> None:
    """For clients of any language: the code of gRPC, and the reason with its metadata."""
    async with AsyncClient(daemon.address) as client:
        await client.pause(holder="alice@host", no_expiry=True)

        async def calls(timeout_s: float) -> Sequence[Awaitable[object]]:
            call = daemon.generation.Generate(generation_pb2.GenerateRequest(text="x"), timeout=timeout_s)
            return [call.read()]

        (error,) = await explained_errors(calls, TIMEOUT_S)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError.reason)
    info = detail_of(error, error_details_pb2.ErrorInfo)
    assert (info.metadata["phase"], info.metadata["holder"]) == ("PAUSED", "alice@host")
    assert "left_s" not in info.metadata


async def test_a_request_that_is_still_being_admitted_learns_it_too(daemon: Daemon) -> None:
    """A constraint that is compiled takes seconds."""
    daemon.engine.admission.clear()
    async with AsyncClient(daemon.address) as client:
        await client.pause(holder="alice@host")

        async def calls(timeout_s: float) -> Sequence[Awaitable[object]]:
            return [client.generate("x", timeout_s=timeout_s)]

        (error,) = await explained_errors(calls, TIMEOUT_S)
        assert isinstance(error, DeadlineError) and "paused by alice@host" in error.message


async def test_an_engine_that_runs_is_no_reason(daemon: Daemon) -> None:
    """The request was slow, or its time short."""
    async with AsyncClient(daemon.address) as client:
        with refuses(DeadlineError, says="did not finish within its timeout") as caught:
            await client.generate("x", timeout_s=SHORT_S)
    assert caught.value.metadata == {}
