"""Pulls from a daemon whose streams break, or bring what it did not send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.client.weights.resumes import MIN_RESUMES, RESUME_TIMEOUT_S
from genserve.errors import ChecksumMismatchError, GenserveError, PushTruncatedError, UnavailableError
from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns
from tests.support.refusals import refuses

DATA = bytes(range(48))


class Puller(weights_pb2_grpc.WeightServiceServicer):
    """Serves version 7 in chunks of 8 bytes; each stream breaks after `chunks_per_stream` of them, without an end frame
    where `breaks` is False. `damages` the chunk at an offset; waits for ever before the one at `hangs_at`; sends an end
    frame before the one at `ends_at`, and before its header if that is negative."""

    def __init__(self) -> None:
        self.requests: list[weights_pb2.PullWeightsRequest] = []
        self.remaining_s: list[float] = []
        self.hanging = asyncio.Event()
        self.chunks_per_stream = 100
        self.breaks = True
        self.damages = -1
        self.hangs_at = -1
        self.ends_at = len(DATA)
        self.ended = asyncio.Event()

    async def PullWeights(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.PullWeightsResponse]:
        context.add_done_callback(lambda _: self.ended.set())  # wherever it was cancelled
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        if self.ends_at < 0:
            yield weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd())
            return
        tensor = weights_pb2.TensorSpec(name="w", dtype="U8", shape=[len(DATA)], offset=0, length=len(DATA))
        manifest = weights_pb2.Manifest(tensors=[tensor], total_bytes=len(DATA))
        yield weights_pb2.PullWeightsResponse(header=weights_pb2.PushHeader(weight_version=7, manifest=manifest))
        start = request.ranges[0].start if request.ranges else 0
        for index, offset in enumerate(range(start, self.ends_at, 8)):
            if index == self.chunks_per_stream:
                break
            if offset == self.hangs_at:
                self.hanging.set()
                await asyncio.Event().wait()
            data = DATA[offset : offset + 8]
            sent = b"\xff" * 8 if offset == self.damages else data
            chunk = weights_pb2.PushChunk(offset=offset, data=sent, crc32c=google_crc32c.value(data))
            yield weights_pb2.PullWeightsResponse(chunk=chunk)
        else:
            yield weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd())
            return
        if self.breaks:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@asynccontextmanager
async def serving(puller: Puller, address: str = "127.0.0.1:0") -> AsyncIterator[int]:
    """A server at an address; its port."""
    server = grpc.aio.server()
    weights_pb2_grpc.add_WeightServiceServicer_to_server(puller, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def pullable() -> AsyncIterator[tuple[Puller, AsyncClient]]:
    """One that serves, and a client of it."""
    puller = Puller()
    async with serving(puller) as port, AsyncClient(f"127.0.0.1:{port}") as client:
        yield puller, client


async def test_a_damaged_chunk_is_not_taken() -> None:
    """The checksum that came with it says so; sent again, it would be as damaged."""
    async with pullable() as (puller, client):
        puller.damages = 16
        with refuses(ChecksumMismatchError, says="8 bytes at 16"):
            await client.pull_weights()
        assert len(puller.requests) == 1


@pytest.mark.parametrize(("ends_at", "problem"), [(16, "after 16 of 48 bytes"), (-1, "after 0 of 0 bytes")])
async def test_a_pull_that_ends_early_returns_no_weights(ends_at: int, problem: str) -> None:
    """The bytes that did not come would be zeros."""
    async with pullable() as (puller, client):
        puller.ends_at = ends_at
        with refuses(GenserveError, says=problem):  # the numbers of bytes
            await client.pull_weights()


async def test_a_pull_that_is_given_up_ends_its_stream() -> None:
    """Its caller may keep the error, and with it all that it came through."""
    async with pullable() as (puller, client):
        puller.hangs_at = 16

        def fail(*_: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await client.pull_weights(progress=fail)
        await asyncio.wait_for(puller.ended.wait(), STEP_S)
        puller.ended.clear()
        puller.hanging.clear()
        given_up = asyncio.create_task(client.pull_weights())
        await asyncio.wait_for(puller.hanging.wait(), STEP_S)
        given_up.cancel()
        await asyncio.wait_for(puller.ended.wait(), STEP_S)


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_cut_stream_goes_on_where_it_was_cut(breaks: bool) -> None:
    """With the version that had begun: another one would be mixed into it."""
    async with pullable() as (puller, client):
        puller.chunks_per_stream, puller.breaks = 2, breaks
        seen: list[tuple[int, int]] = []
        pulled = await client.pull_weights(progress=lambda *sizes: seen.append(sizes))
        assert (pulled.weight_version, bytes(pulled.tensors["w"].data)) == (7, DATA)
        assert [[(r.start, r.end) for r in each.ranges] for each in puller.requests] == [[], [(16, 48)], [(32, 48)]]
        assert [each.weight_version for each in puller.requests] == [0, 7, 7]
        assert seen == [(8 * chunk, 48) for chunk in range(1, 7)]


@pytest.mark.parametrize(("breaks", "error"), [(True, UnavailableError), (False, PushTruncatedError)])
async def test_a_stream_that_always_breaks_is_given_up(breaks: bool, error: type[GenserveError]) -> None:
    """After so many resumes that a daemon which restarts is there again, and no more."""
    async with pullable() as (puller, client):
        puller.chunks_per_stream, puller.breaks = 0, breaks
        with advanced_clock() as clock:
            pulling = asyncio.create_task(client.pull_weights())
            await clock.advance_until(pulling.done, 0.5)
            with refuses(error):
                await pulling
        assert len(puller.requests) > MIN_RESUMES


async def test_a_pull_waits_for_a_daemon_that_restarts(tmp_path: Path) -> None:
    """One that was never there is not waited for."""
    address = f"unix:{tmp_path}/s"
    puller = Puller()
    puller.hangs_at = 16
    async with AsyncClient(address) as early:
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(early.pull_weights(), STEP_S)
    async with AsyncClient(address) as client:
        async with serving(puller, address):
            pulling = asyncio.create_task(client.pull_weights(timeout_s=50.0))
            await asyncio.wait_for(puller.hanging.wait(), STEP_S)
        puller.hangs_at = -1
        for _ in range(3):
            with pytest.raises(UnavailableError):  # so it has tried to connect
                await client.status()
        await turns()
        assert not pulling.done()
        async with serving(puller, address):
            assert bytes((await pulling).tensors["w"].data) == DATA
    first_s, second_s = puller.remaining_s
    assert 0 < second_s < first_s < 50.5


async def test_a_pull_whose_daemon_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    """As a push is, long before the deadline."""
    address = f"unix:{tmp_path}/s"
    puller = Puller()
    puller.hangs_at = 16
    async with AsyncClient(address) as client:
        async with serving(puller, address):
            pulling = asyncio.create_task(client.pull_weights(timeout_s=600.0))
            await asyncio.wait_for(puller.hanging.wait(), STEP_S)
        with advanced_clock() as clock:
            began_s = clock.now_s()
            await clock.advance_until(lambda: pulling.done() or clock.now_s() - began_s > 300, 0.5)
            assert pulling.done() and clock.now_s() - began_s >= RESUME_TIMEOUT_S
            with refuses(UnavailableError):
                await pulling
