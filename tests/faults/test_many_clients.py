"""Many clients that wait, go away, or do not read: what they asked for is bounded, and nothing of it remains."""

import asyncio
import random
import re
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, GenserveError
from genserve.transport.errors import ClientClosedError
from genserve.v1 import generation_pb2
from tests.faults.bystander import Bystander
from tests.support import patience
from tests.support.footprint import private_bytes, reset_peak, resident_bytes, tree
from tests.support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    WINDOW_UPDATE,
    call_headers,
    connected,
    frame_bytes,
    frame_of,
)
from tests.support.subject import Subject

LONG = pytest.mark.long("genserve/rpc", "genserve/engine/vllm/requests")
MAX_ACTIVE = 1024
"""--max-active-requests of the daemon of most tests."""
NUM_ASKED = 1500
MAX_GROWTH_BYTES = 50 * 10**6
"""Of the daemon, without its engine."""
WRITE_TIMEOUT_S = 5.0
"""Of the daemon of most tests."""
GENERATE = "/genserve.v1.GenerationService/Generate"


async def until_idle(client: AsyncClient) -> None:
    """Nothing runs or waits, and no block of the KV cache is in use."""
    async with asyncio.timeout(3 * patience.STEP_S):
        while (load := (await client.status()).load).running or load.waiting or load.kv_usage:
            await asyncio.sleep(0.01)


async def holds(subject: Subject, version: int, before_bytes: int) -> None:
    """The oracle, for what the daemon itself holds: vLLM's workers keep what many different batches take, up to
    hundreds of megabytes, with and without genserve."""
    assert resident_bytes(subject.pid) - before_bytes <= MAX_GROWTH_BYTES
    baseline = subject.oracle.baseline
    assert baseline is not None
    kept_bytes = sum(map(private_bytes, tree(subject.pid)))
    subject.oracle.baseline = replace(baseline, private_bytes=max(baseline.private_bytes, kept_bytes))
    await subject.oracle.holds((version, "a"))


async def test_requests_that_come_during_a_pause_are_bounded(subject: Subject) -> None:
    """As many wait as may, the others are QUEUE_FULL, and those that wait are generated afterwards."""
    version, before_bytes = await subject.oracle.served_version(), resident_bytes(subject.pid)
    request = generation_pb2.GenerateRequest(token_ids={"ids": [1, 2]}, stop={"max_tokens": 1, "ignore_eos": True})
    message = generation_pb2.GenerateManyRequest(generate=request, form=generation_pb2.GENERATE_MANY_FORM_ITEMS)
    async with AsyncExitStack() as stack:
        paused = await stack.enter_async_context(AsyncExitStack())
        await paused.enter_async_context(subject.client.paused(ttl_s=60))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(subject.process.address))
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/genserve.v1.GenerationService/GenerateMany"
        )
        call = method(iter([message.SerializeToString()] * NUM_ASKED), timeout=120)
        ends: Counter[str] = Counter()
        async for data in call:
            for item in generation_pb2.GenerateManyResponse.FromString(data).items:  # type: ignore[attr-defined]
                kind = item.WhichOneof("result")
                if kind == "error":
                    ends["refused"] += 1
                elif item.response.HasField("usage"):
                    ends["generated"] += 1
            if ends["refused"] == NUM_ASKED - MAX_ACTIVE and not ends["generated"]:
                load = (await subject.client.status()).load
                assert load.running + load.waiting == MAX_ACTIVE
                await paused.aclose()
    assert ends == {"refused": NUM_ASKED - MAX_ACTIVE, "generated": MAX_ACTIVE}
    await until_idle(subject.client)
    await holds(subject, version, before_bytes)


@pytest.mark.parametrize("num_clients", [240, pytest.param(1000, marks=LONG)])
async def test_nothing_remains_of_clients_that_went_away(subject: Subject, num_clients: int) -> None:
    """By disconnecting, cancelling and running out of time, at any moment of their streams."""
    version, before_bytes = await subject.oracle.served_version(), resident_bytes(subject.pid)
    rng, gate = random.Random(5), asyncio.Semaphore(64)
    outcomes: Counter[str] = Counter()

    async def goes_away(number: int) -> None:
        way = ("disconnects", "cancels", "runs out of time")[number % 3]
        wait_s = rng.uniform(0.0, 0.3)
        async with gate, AsyncExitStack() as stack:
            client = subject.client
            if way == "disconnects":
                client = await stack.enter_async_context(AsyncClient(subject.process.address))
            timeout_s = wait_s if way == "runs out of time" else 60.0
            options = {"max_tokens": 1500, "ignore_eos": True, "timeout_s": max(timeout_s, 0.01)}
            call = asyncio.create_task(client.generate([number % 50 + 1, 7], **options))  # type: ignore[arg-type]
            await asyncio.wait([call], timeout=wait_s if way != "runs out of time" else 30.0)
            if way == "disconnects":
                await client.close()
            elif way == "cancels":
                call.cancel()
            try:
                await call
            except (GenserveError, ClientClosedError, asyncio.CancelledError) as error:
                outcomes[f"{way}: {type(error).__name__}"] += 1

    async with Bystander.of(subject):
        await asyncio.gather(*(goes_away(number) for number in range(num_clients)))
    print(dict(outcomes))
    assert sum(outcomes.values()) == num_clients, "some were answered in full"
    assert outcomes[f"runs out of time: {DeadlineError.__name__}"] == num_clients // 3
    await until_idle(subject.client)
    await holds(subject, version, before_bytes)


@pytest.mark.parametrize(
    ("num_clients", "num_tokens"), [pytest.param(12, 800, marks=LONG), pytest.param(100, 800, marks=LONG)]
)
async def test_clients_that_never_read_are_cut_at_the_write_deadline(
    subject: Subject, num_clients: int, num_tokens: int
) -> None:
    """They read nothing from their sockets. Others are served beside them, memory is bounded, and the
    engine has its blocks back while they are still connected. Who reads on then is told why."""
    version, before_bytes = await subject.oracle.served_version(), resident_bytes(subject.pid)
    request = generation_pb2.GenerateRequest(
        token_ids={"ids": [1, 2]}, stop={"max_tokens": num_tokens, "ignore_eos": True}, output={"logprobs": 20}
    ).SerializeToString()
    call = frame_bytes(HEADERS, END_HEADERS, call_headers(GENERATE), 1)
    call += frame_bytes(DATA, END_STREAM, b"\0" + len(request).to_bytes(4, "big") + request, 1)
    reset_peak(subject.pid)
    async with AsyncExitStack() as stack:
        links = [await stack.enter_async_context(connected(subject.process.address, 250.0)) for _ in range(num_clients)]
        async with Bystander.of(subject) as bystander:
            for _, writer in links:
                writer.write(call)
            async with asyncio.timeout(200):
                while (await subject.client.status()).load.running < num_clients // 2:
                    await asyncio.sleep(0.01)
                # Between two batches nothing runs while the second one waits. One call is the bystander's.
                while (load := (await subject.client.status()).load).running + load.waiting > 1:
                    await asyncio.sleep(0.1)
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=1.5 * WRITE_TIMEOUT_S)
            grown = resident_bytes(subject.pid, peak=True) - before_bytes
        await until_idle(subject.client)
        ends = Counter(await asyncio.gather(*(end_of(*link) for link in links)))
    print(
        f"memory + {grown / 1e6:.0f} MB at most; {len(bystander.latencies_s)} calls of a bystander, p99 "
        f"{1e3 * bystander.percentile_s(0.99):.0f} ms; {dict(ends)}"
    )
    assert ends == {f"the client did not read for {WRITE_TIMEOUT_S:g} s": num_clients}
    assert grown <= MAX_GROWTH_BYTES
    await holds(subject, version, before_bytes)


async def end_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Reads on; what the last headers of the stream say."""
    more = (1 << 30).to_bytes(4, "big")
    writer.write(frame_bytes(WINDOW_UPDATE, 0, more, 1) + frame_bytes(WINDOW_UPDATE, 0, more))
    while True:
        kind, flags, payload = await frame_of(reader)
        if kind == HEADERS and flags & END_STREAM:
            found = re.search(rb"the client did not read for [\d.]+ s", payload)
            return found[0].decode() if found else f"ended with {payload!r:.500}"
