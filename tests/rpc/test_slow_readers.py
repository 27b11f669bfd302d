"""Clients that do not read their tokens: their streams end at the write deadline, and nobody else's."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from genserve.engine.generation import GenerationUpdate
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, generation_pb2
from tests.support.clocks import advanced_clock
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, Daemon, reason_of, serving, update

WRITE_TIMEOUT_S = 60.0
LARGE_CHARS = 100_000
REQUEST = generation_pb2.GenerateRequest(text="hi", request_id="r")
METHODS = {
    "Generate": lambda stub: stub.Generate(REQUEST, timeout=60),
    "GenerateMany": lambda stub: stub.GenerateMany(
        iter([generation_pb2.GenerateManyRequest(generate=REQUEST)]), timeout=60
    ),
}


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    config = ServeConfig(port=0, max_message_bytes=MAX_MESSAGE_BYTES, write_timeout_s=WRITE_TIMEOUT_S)
    async with serving(config) as running:
        yield running


async def time_passes_until(ended: asyncio.Event) -> None:
    """By the clock, for who waits for a client to read. Its connection takes something for a while."""
    with advanced_clock() as clock:
        await clock.advance_until(ended.is_set, WRITE_TIMEOUT_S / 8)


def large(*, last: bool = False) -> GenerationUpdate:
    """A message of which few fit into what gRPC and TCP hold for a reader."""
    each = update(1, last=last)
    each.outputs[0].text = "x" * LARGE_CHARS
    return each


async def read(call: Any) -> int:
    """Reads until the end; the number of messages."""
    num_messages = 0
    while await call.read() is not grpc.aio.EOF:
        num_messages += 1
    return num_messages


@pytest.mark.parametrize("method", METHODS)
async def test_a_stream_that_is_not_read_ends_and_says_why(daemon: Daemon, method: str) -> None:
    """Its request ends in the engine at once. Who reads on then gets what was written, and the reason."""
    call = METHODS[method](daemon.generation)
    stream = await daemon.stream()
    for _ in range(400):
        stream.put(large())
    await time_passes_until(stream.closed)
    assert stream.updates.qsize() > 0, "everything was written, and nothing was shown"
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read(call)
    assert (ended.value.code(), reason_of(ended.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert f"{WRITE_TIMEOUT_S:g} s" in ended.value.details()


@pytest.mark.parametrize("method", METHODS)
async def test_a_stream_that_waits_for_tokens_is_let_wait(daemon: Daemon, method: str) -> None:
    """Longer than the deadline: it is the engine that is slow."""
    call = METHODS[method](daemon.generation)
    stream = await daemon.stream()
    stream.put(update(1, first=True))
    await call.read()
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # the daemon has seen its write end, too
    with advanced_clock() as clock:
        for _ in range(20):
            await clock.advance(WRITE_TIMEOUT_S / 8)
    assert not stream.closed.is_set()
    stream.put(update(2, last=True))
    assert await read(call) == 1
    assert await call.code() is grpc.StatusCode.OK


async def test_a_slow_reader_that_goes_on_is_let_finish(daemon: Daemon) -> None:
    """The control: in all it takes longer than the deadline, and each message less."""
    call = METHODS["Generate"](daemon.generation)
    stream = await daemon.stream()
    for _ in range(199):
        stream.put(large())
    stream.put(large(last=True))
    with advanced_clock() as clock:
        for _ in range(200):
            assert await call.read() is not grpc.aio.EOF
            await clock.advance(WRITE_TIMEOUT_S / 150)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_stream_that_nobody_reads_delays_no_other_on_its_connection(daemon: Daemon) -> None:
    """On one connection: flow control is of each stream."""
    stuck = METHODS["GenerateMany"](daemon.generation)
    stream = await daemon.stream()
    for _ in range(400):
        stream.put(large())
    call = daemon.generation.Generate(generation_pb2.GenerateRequest(text="hi"), timeout=20)
    other = await daemon.stream(1)
    for number in range(20):
        other.put(update(number, first=number == 0, last=number == 19))
    assert await read(call) == 20
    await time_passes_until(stream.closed)
    stuck.cancel()
