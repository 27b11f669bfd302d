"""The connections of a client end with it, before Python collects garbage: a daemon bounds their number."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, ManifestMismatchError, PauseLeaseLostError
from genserve.transport.errors import ClientClosedError
from genserve.v1 import control_pb2
from tests.support.patience import turns, until
from tests.support.scripted_daemon import Daemon


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Nothing is freed that is part of a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_connections(daemon: Daemon) -> int:
    """Of this process, which is the daemon's as well, to the daemon."""
    port = int(daemon.address.rpartition(":")[2])
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


@pytest.mark.slow
@pytest.mark.parametrize("use", [closed_meanwhile, watched_until_closed, late, given_up, refused, refused_push])
async def test_no_connection_outlives_its_client(
    daemon: Daemon, without_collection: None, use: Callable[[AsyncClient, Daemon], Awaitable[None]]
) -> None:
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # the own connection of the fixture
    before = num_connections(daemon)
    for _ in range(3):
        async with AsyncClient(daemon.address) as client:
            await use(client, daemon)
    await until(lambda: num_connections(daemon) <= before)
