"""Clients that flood the daemon with connections, frames, headers and messages: others are served, memory is bounded,
and afterwards everything is as before."""

import asyncio
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.message_factory import GetMessageClass

from genserve.client import AsyncClient
from genserve.rpc.server import SERVICE_NAMES
from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from tests.faults.bystander import Bystander
from tests.faults.limits import limited
from tests.support.answers import answer_of
from tests.support.footprint import reset_peak, resident_bytes
from tests.support.http2 import (
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    call_headers,
    connected,
    frame_bytes,
    literal,
)
from tests.support.subject import Subject

LONG = pytest.mark.long("genserve/rpc")
MAX_GROWTH_BYTES = 96 << 20
NUM_RESETS, CONNECTIONS = 5_000, 4
RESETS_GROWTH_BYTES = CONNECTIONS * NUM_RESETS * (16 << 10)
"""Of calls that gRPC keeps until they are read, 14 KB each: nobody else's is refused for them. A daemon that gets no
CPU for a while reads none of them meanwhile."""
GENERATE = "/genserve.v1.GenerationService/Generate"
NUM_FRAMES = {"rapid resets": NUM_RESETS}
MANY_FRAMES = 50_000
FLOOD_S = 10.0
NUM_ROUNDS = 20
NOT_THEIR_FAULT = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")
SEED = 7
CANCEL = struct.pack(">I", 8)


@asynccontextmanager
async def bounded(subject: Subject, growth_bytes: int = MAX_GROWTH_BYTES) -> AsyncIterator[None]:
    """The daemon's memory grows no more than this in the block, a bystander is served, and then the oracle holds."""
    version = await subject.oracle.served_version()
    before_bytes = resident_bytes(subject.pid)
    reset_peak(subject.pid)
    async with Bystander.of(subject) as bystander:
        for _ in range(5):
            await bystander.ask()
        calm_s = bystander.percentile_s(0.99)
        bystander.latencies_s.clear()
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        await bystander.until_served()
        grown = resident_bytes(subject.pid, peak=True) - before_bytes
        served = len(bystander.latencies_s)
        p99_s = bystander.percentile_s(0.99)
        print(
            f"{took_s:.1f} s, memory + {grown / 1e6:.0f} MB at most, {served} calls of a bystander, "
            f"p99 {1e3 * p99_s:.0f} ms (before: {1e3 * calm_s:.0f})"
        )
        assert grown <= growth_bytes
    await subject.oracle.holds((version, "a"))


def resets(number: int) -> bytes:
    """A call that is reset at once."""
    stream = 2 * number + 1
    begun = frame_bytes(HEADERS, END_HEADERS, call_headers(GENERATE), stream)
    return begun + frame_bytes(RST_STREAM, 0, CANCEL, stream)


def endless_headers(number: int) -> bytes:
    """One block of headers that never ends."""
    block = literal(f"x-{number}", "v" * 1000)
    if number == 0:
        return frame_bytes(HEADERS, 0, call_headers(GENERATE) + block, 1)
    return frame_bytes(CONTINUATION, 0, block, 1)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid resets": resets,
    "pings": lambda number: frame_bytes(PING, 0, struct.pack(">Q", number)),
    "settings": lambda number: frame_bytes(SETTINGS, 0, struct.pack(">HI", 4, 65535 + number % 2)),
    "endless headers": endless_headers,
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_frames_harms_nobody_else(subject: Subject, flood: str) -> None:
    """From four connections at a time, whose client reads nothing."""

    async def attack() -> None:
        with suppress(OSError, TimeoutError):
            async with connected(subject.process.address, FLOOD_S) as (_, writer):
                for number in range(NUM_FRAMES.get(flood, MANY_FRAMES)):
                    writer.write(FLOODS[flood](number))
                    if number % 100 == 0:
                        await writer.drain()

    async with bounded(subject, RESETS_GROWTH_BYTES if flood == "rapid resets" else MAX_GROWTH_BYTES):
        await asyncio.gather(*(attack() for _ in range(CONNECTIONS)))


async def test_headers_that_are_too_large_end_their_call_or_connection(subject: Subject) -> None:
    """A megabyte in one call, as gRPC sends it; the next call with small ones is answered."""
    async with bounded(subject), grpc.aio.insecure_channel(subject.process.address) as channel:
        status: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/genserve.v1.ControlService/GetStatus"
        )
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await status(b"", metadata=(("x", "v" * (1 << 20)),), timeout=60)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await status(b"", timeout=60)


async def test_more_connections_than_descriptors_are_no_end(subject: Subject) -> None:
    """`ulimit -n 256` and 400 connections, three times over. Who was connected before is served all the time; when the
    others have gone, the daemon takes connections again."""
    host, port = subject.process.address.rsplit(":", 1)
    version = await subject.oracle.served_version()
    async with Bystander.of(subject) as bystander:
        with limited(subject.pid, psutil.RLIMIT_NOFILE, 256):
            for _ in range(3):
                opened = []
                for _ in range(400):
                    with suppress(OSError):
                        opened.append((await asyncio.open_connection(host, int(port)))[1])
                        opened[-1].write(PREFACE + frame_bytes(SETTINGS, 0))
                await bystander.ask()
                for writer in opened:
                    writer.transport.abort()
        async with AsyncClient(subject.process.address) as late:
            await late.wait_ready(60)
            await late.generate([1, 2, 3], max_tokens=1, ignore_eos=True, timeout_s=60)
    await subject.oracle.holds((version, "a"))


@pytest.mark.parametrize(
    "method",
    [
        "WeightService/PushWeights",
        pytest.param("GenerationService/Generate", marks=LONG),
        pytest.param("ControlService/Pause", marks=LONG),
    ],
)
async def test_a_compressed_message_is_not_unpacked_beyond_the_limit(subject: Subject, method: str) -> None:
    """256 MiB of zeros are 256 KiB on the wire; --max-message-bytes is 64 MiB."""
    async with bounded(subject, 160 << 20), grpc.aio.insecure_channel(subject.process.address) as channel:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/genserve.v1.{method}")
        answers = call(iter([bytes(256 << 20)]), compression=grpc.Compression.Gzip, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer_of(answers, answers.read())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def noise(rng: random.Random, kind: Any) -> bytes:
    """A message of random bytes, or of fields of this kind with random contents, cut off anywhere."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(200))
    fields = kind.DESCRIPTOR.fields or [None]
    tags = [b"" if field is None else bytes([field.number << 3 & 0x7F | rng.choice((0, 1, 2, 5))]) for field in fields]
    data = b"".join(rng.choice(tags) + rng.randbytes(rng.randrange(12)) for _ in range(8))
    return data[: rng.randrange(len(data) + 1)]


@pytest.mark.failure_is_final
@pytest.mark.parametrize("num_rounds", [4, pytest.param(20, marks=LONG)])
async def test_messages_of_random_bytes_crash_nothing(subject: Subject, num_rounds: int) -> None:
    """To every method of every service: each call ends with a status that says whose fault it is."""
    rng, codes, wrong = random.Random(SEED), Counter[str](), set[str]()
    calls: list[tuple[str, Any]] = [
        (f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type))
        for file in (generation_pb2, weights_pb2, control_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name not in ("Sleep", "WakeUp", "Drain")  # what is valid by chance is carried out
    ]
    assert {path.split("/")[1] for path, _ in calls} == set(SERVICE_NAMES)
    async with bounded(subject), grpc.aio.insecure_channel(subject.process.address) as channel:

        async def one(path: str, messages: list[bytes]) -> None:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
            try:
                async for _ in method(iter(messages), timeout=0.5):
                    pass
                codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1
                # What gRPC says in the client when it cannot send the next message, because the call has ended.
                if error.code().name in NOT_THEIR_FAULT and error.details() != "Internal error from Core":
                    wrong.add(f"{path}: {error.code().name}: {error.details()}")

        for _ in range(num_rounds):
            noises = [(path, [noise(rng, kind) for _ in range(rng.randrange(1, 4))]) for path, kind in calls]
            await asyncio.gather(*(one(path, messages) for path, messages in noises))
            await subject.client.resume(force=True)
    print(dict(codes))
    assert codes["INVALID_ARGUMENT"] > 0
    assert not wrong


@pytest.mark.failure_is_final
async def test_random_frames_of_http2_crash_nothing(subject: Subject) -> None:
    """Any type, flags, stream and length, after an honest beginning."""
    rng = random.Random(SEED)

    async def attack(data: bytes) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with connected(subject.process.address, 5.0) as (reader, writer):
                writer.write(frame_bytes(HEADERS, END_HEADERS, call_headers(GENERATE), 1) + data)
                writer.write_eof()
                await reader.read()

    async with bounded(subject):
        for _ in range(NUM_ROUNDS):
            await asyncio.gather(*(attack(random_frames(rng)) for _ in range(20)))


def random_frames(rng: random.Random) -> bytes:
    """Some frames, of which the last may be cut off."""
    frames = [
        frame_bytes(
            rng.randrange(12), rng.randrange(256), rng.randbytes(rng.randrange(64)), rng.choice((0, 1, 1, 3, 5))
        )
        for _ in range(rng.randrange(1, 20))
    ]
    data = b"".join(frames)
    return data[: len(data) - rng.choice((0, 0, rng.randrange(9)))]
