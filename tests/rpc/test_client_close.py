"""The connections of a client end with it, before Python collects garbage: a daemon bounds their number."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import psutil
import pytest
import torch

from genserve.client import AsyncClient, PushProgress
from genserve.client.weights.layout import ByteSpace
from genserve.errors import DeadlineError, GenserveError, ManifestMismatchError, PauseLeaseLostError
from genserve.transport.errors import ClientClosedError
from genserve.v1 import control_pb2, weights_pb2_grpc
from tests.rpc.served import weights
from tests.support.patience import turns, until
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Nothing is freed that is part of a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_connections(address: str) -> int:
    """Of this process, which is the daemon's as well, to the daemon."""
    port = int(address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr and each.raddr.port == port for each in found)


async def check_closed(*calls: "asyncio.Task[Any]") -> None:
    """Not raised here: a frame with a task in the traceback of its error would form a cycle of the test's own."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in ended} == {ClientClosedError}


async def closed_meanwhile(client: AsyncClient, daemon: Daemon) -> None:
    before = len(daemon.engine.streams)
    calls = [asyncio.create_task(client.generate([1], max_tokens=8)) for _ in range(3)]
    await until(lambda: len(daemon.engine.streams) == before + 3)
    await client.status()  # answered on the same connection: the calls know that they were admitted
    await turns()
    await client.close()
    await check_closed(*calls)


async def watched_until_closed(client: AsyncClient, daemon: Daemon) -> None:
    told = asyncio.Event()

    async def watch() -> None:
        async for _ in client.watch_status():
            told.set()

    call = asyncio.create_task(watch())
    await until(told.is_set)
    await client.close()
    await check_closed(call)


async def late(client: AsyncClient, daemon: Daemon) -> None:
    with pytest.raises(DeadlineError):
        await client.generate([1], max_tokens=8, timeout_s=0.3)


async def given_up(client: AsyncClient, daemon: Daemon) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.generate([1], max_tokens=8)


async def refused(client: AsyncClient, daemon: Daemon) -> None:
    with pytest.raises(PauseLeaseLostError):
        await client.resume("unknown")


async def refused_push(client: AsyncClient, daemon: Daemon) -> None:
    with pytest.raises(ManifestMismatchError):
        await client.push_weights({"unknown": torch.zeros(3)}, version=1)


async def failed_push(client: AsyncClient, daemon: Daemon) -> None:
    def progress(_: PushProgress) -> None:
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        await client.push_weights(weights(1), version=daemon.engine.weight_version + 1, progress=progress)


async def late_push(client: AsyncClient, daemon: Daemon) -> None:
    daemon.engine.gates["prepare_weights"] = Gate()
    with pytest.raises(DeadlineError):
        await client.push_weights(weights(1), version=daemon.engine.weight_version + 1, timeout_s=0.3)
    daemon.engine.gates.pop("prepare_weights").open.set()
    await until(lambda: not any(each.is_held for each in daemon.registry.live.values()))


async def given_up_push(client: AsyncClient, daemon: Daemon) -> None:
    gate = daemon.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(client.push_weights(weights(1), version=daemon.engine.weight_version + 1))
    await gate.reached.wait()
    pushing.cancel()
    await asyncio.wait([pushing])
    daemon.engine.gates.pop("prepare_weights").open.set()
    await until(lambda: not any(each.is_held for each in daemon.registry.live.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        closed_meanwhile,
        watched_until_closed,
        late,
        given_up,
        refused,
        refused_push,
        failed_push,
        late_push,
        given_up_push,
    ],
)
async def test_no_connection_outlives_its_client(
    daemon: Daemon, without_collection: None, use: Callable[[AsyncClient, Daemon], Awaitable[None]]
) -> None:
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # the own connection of the fixture
    before = num_connections(daemon.address)
    for _ in range(3):
        async with AsyncClient(daemon.address) as client:
            await use(client, daemon)
    await until(lambda: num_connections(daemon.address) <= before)


class RefusingWeights(weights_pb2_grpc.WeightServiceServicer):
    """Refuses each push when its header has come. `is_asked`: one has come."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def PushWeights(self, request_iterator: Any, context: Any) -> Any:
        """As gRPC calls it, in a thread."""
        next(request_iterator)
        self.is_asked.set()
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")


async def push_refused_before_its_first_frame(patches: pytest.MonkeyPatch) -> None:
    """gRPC knows of the refusal when this frame is to be written, and the client does not."""
    service, server, chunks = RefusingWeights(), grpc.server(ThreadPoolExecutor(2)), ByteSpace.chunks
    weights_pb2_grpc.add_WeightServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    def wait_for_refusal() -> None:
        assert service.is_asked.wait(60) and server.stop(60).wait(120)
        ends_s = time.monotonic() + 60
        while num_connections(address) and time.monotonic() < ends_s:  # gRPC closes it when it has read everything
            time.sleep(0.01)

    async def late_chunks(*args: Any) -> AsyncIterator[tuple[int, list[memoryview]]]:
        wait_for_refusal()  # the event loop is stopped meanwhile
        async for each in chunks(*args):
            yield each

    patches.setattr(ByteSpace, "chunks", late_chunks)
    async with AsyncClient(address) as client:
        with pytest.raises(GenserveError, match="refused"):
            await client.push_weights({"weight": torch.zeros(3)}, version=1)


async def test_no_call_outlives_a_push_whose_write_fails(without_collection: None) -> None:
    """A call keeps its connection. Whether the refusal or the failure is told first is gRPC's choice: of several pushes
    some find each."""
    for _ in range(20):
        with pytest.MonkeyPatch.context() as patches:
            await push_refused_before_its_first_frame(patches)
    await until(lambda: not any(issubclass(type(each), grpc.aio.StreamUnaryCall) for each in gc.get_objects()))
