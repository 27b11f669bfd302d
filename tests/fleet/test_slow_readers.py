"""Clients of a router that do not read their tokens: their streams end at the router's write deadline."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from genserve.settings.config import ServeConfig
from genserve.v1 import generation_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fleet.scripted_fleet import SETTINGS as SCRIPTED
from tests.fleet.scripted_fleet import ScriptedFleet, scripted_fleet, tokens
from tests.support.clocks import advanced_clock
from tests.support.footprint import resident_bytes
from tests.support.patience import until
from tests.support.router_process import RouterProcess
from tests.support.scripted_daemon import reason_of, serving

WRITE_TIMEOUT_S = 60.0
SETTINGS = replace(SCRIPTED, silence_s=24 * 3600.0)  # only the time of writes is to pass
MANY = list(range(16_000))
NUM_UNREAD = 64
UNREAD_BYTES = 1 << 20
"""What one of them may cost: the windows, a message that comes and one that goes, and what malloc keeps."""
REQUEST = generation_pb2.GenerateRequest(request_id="a", token_ids={"ids": [1, 2, 3]})
METHODS = {
    "Generate": lambda stub: stub.Generate(REQUEST, timeout=60),
    "GenerateMany": lambda stub: stub.GenerateMany(
        iter([generation_pb2.GenerateManyRequest(generate=REQUEST)]), timeout=60
    ),
}


async def until_served(router: ScriptedFleet) -> None:
    """A request of another client is answered."""
    call = router.generation.Generate(generation_pb2.GenerateRequest(request_id="b", text="hi"), timeout=20)
    _, stream = await router.running("b")
    stream.put(tokens([1], prompt=3))
    await call.read()
    call.cancel()


async def read(call: Any) -> None:
    """Reads until the end."""
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("method", METHODS)
async def test_a_stream_that_is_not_read_ends_and_says_why(method: str) -> None:
    """Its request ends in the replica, and the replica is not taken for lost."""
    async with scripted_fleet(2, SETTINGS, write_timeout_s=WRITE_TIMEOUT_S) as router:
        call = METHODS[method](router.generation)
        _, stream = await router.running("a")
        stream.put(tokens([1], prompt=3))
        for index in range(1500):
            stream.put(tokens(MANY, 1 + len(MANY) * index))
        with advanced_clock() as clock:
            await clock.advance_until(stream.closed.is_set, WRITE_TIMEOUT_S / 8)
        assert stream.updates.qsize() > 0, "everything was written, and nothing was shown"
        assert len(router.fleet.ready) == 2
        await until_served(router)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read(call)
        assert (ended.value.code(), reason_of(ended.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert f"{WRITE_TIMEOUT_S:g} s" in ended.value.details()
        await until(lambda: all(member.inflight == 0 for member in router.fleet.members))


@pytest.mark.slow
async def test_client_that_leaves_its_aborted_requests_unread_is_not_read(router: ScriptedFleet) -> None:
    """Requests that wait for a replica count no more when they are ended: their answers wait here for the client."""
    for link in router.links:
        link.kill()
    await until(lambda: not router.fleet.ready)
    num_requests, num_sent = 4_000, 0  # 32 MB, far more than gRPC itself keeps

    async def asked() -> AsyncIterator[generation_pb2.GenerateManyRequest]:
        nonlocal num_sent
        for num_sent in range(1, num_requests + 1):
            large = generation_pb2.GenerateRequest(request_id=str(num_sent), text="x" * 8_000, sampling={"n": 256})
            yield generation_pb2.GenerateManyRequest(generate=large)  # its answer has 3 KiB
            yield generation_pb2.GenerateManyRequest(abort=str(num_sent))

    call = router.generation.GenerateMany(asked())
    before, stuck = 0, 0
    while stuck < 20:
        await asyncio.sleep(0.05)
        stuck = stuck + 1 if num_sent == before else 0
        before = num_sent
    assert before < num_requests
    assert sum([len(response.items) async for response in call]) == num_requests, "it goes on when the client reads"


@pytest.mark.slow
async def test_streams_that_nobody_reads_cost_a_router_little(tmp_path: Path) -> None:
    """What the replica has for them stays there."""
    async with serving(ServeConfig(port=0)) as daemon:
        router = RouterProcess(["--port", "0", "--replica", daemon.address], tmp_path / "router.log")
        options = (("grpc.http2.lookahead_bytes", 64 << 10), ("grpc.http2.bdp_probe", 0))
        try:
            async with grpc.aio.insecure_channel(router.address, options=options) as channel:
                generation, streams = GenerationServiceStub(channel), daemon.engine.streams
                requests = [generation_pb2.GenerateRequest(request_id=str(n), text="x") for n in range(NUM_UNREAD)]
                calls = [generation.Generate(request, timeout=300) for request in requests]
                await until(lambda: len(streams) == NUM_UNREAD)
                for stream in streams:
                    stream.put(tokens([1], prompt=3))
                for call in calls:
                    await call.read()
                before_bytes = resident_bytes(router.process.pid)
                for number in range(200):
                    for stream in streams:
                        stream.put(tokens(MANY, 1 + len(MANY) * number))
                before, stuck = 0, 0
                while stuck < 20:
                    await asyncio.sleep(0.05)
                    left = sum(stream.updates.qsize() for stream in streams)
                    stuck = stuck + 1 if left == before else 0
                    before = left
                grown_bytes = resident_bytes(router.process.pid) - before_bytes
                print(f"{before_bytes >> 20} MiB, + {grown_bytes >> 20} MiB for {NUM_UNREAD} streams")
                assert all(stream.updates.qsize() for stream in streams), "everything was written"
                assert grown_bytes < NUM_UNREAD * UNREAD_BYTES
        finally:
            router.kill()
