"""What a worker on another host fetches, from the real services over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

import genserve.rpc.weights as servicer_module
from genserve.client import AsyncClient
from genserve.errors import PushNotFoundError, UnavailableError
from genserve.memory.arena import Arena, map_arena
from genserve.v1 import weights_pb2
from genserve.weights.push.pulled_push import PulledPush
from genserve.worker import fetch
from genserve.worker.contract.calls import Fetch, Progress
from genserve.worker.fetch import FetchedBytes
from tests.rpc.served import weights
from tests.support.patience import STEP_S, until
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate

RANK = "dp0:pp0:pcp0:tp1"
SIZE_BYTES = 32
CONTENT = b"".join(bytes(tensor.data) for tensor in weights(1).values())


def wanted(daemon: Daemon, push_id: str = "p", timeout_s: float = 10.0) -> Fetch:
    """What the daemon asks for."""
    return Fetch("n", [RANK], daemon.address, push_id, SIZE_BYTES, timeout_s)


async def fetched(request: Fetch) -> tuple[FetchedBytes, Progress]:
    """A copy, and what came of it."""
    copy = FetchedBytes(RANK, request)
    assert copy.progress == Progress(RANK, "n", done=False)
    await asyncio.to_thread(copy.run)
    return copy, copy.progress


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    """Those that copies have allocated."""
    made: list[Arena] = []
    allocate = Arena.allocate

    def recorded(size_bytes: int) -> Arena:
        made.append(allocate(size_bytes))
        return made[-1]

    monkeypatch.setattr(fetch.Arena, "allocate", recorded)
    return made


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """A client of the server."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


@pytest.fixture
async def preparing(daemon: Daemon, client: AsyncClient) -> AsyncIterator["asyncio.Task[Any]"]:
    """A push "p" of version 1 that workers are preparing."""
    gate = daemon.engine.gates["prepare_weights"] = Gate()
    push = asyncio.create_task(client.push_weights(weights(1), version=1, push_id="p"))
    await gate.reached.wait()
    yield push
    gate.open.set()
    await asyncio.wait([push])


async def test_bytes_of_a_push_that_is_prepared(daemon: Daemon, preparing: object, arenas: list[Arena]) -> None:
    """They are those that were pushed, where they were pushed to; and the copy's memory goes with it."""
    copy, progress = await fetched(wanted(daemon))
    assert (progress.done, progress.error) == (True, "")
    assert map_arena(progress.arena_path, SIZE_BYTES)[:] == CONTENT
    assert [arena.closed for arena in arenas] == [False]
    copy.close()
    copy.close()
    assert arenas[0].closed


async def test_bytes_that_are_served(daemon: Daemon, client: AsyncClient) -> None:
    """Without an id: what an exchange that could not be undone is healed with."""
    await client.push_weights(weights(1), version=1, push_id="p")
    copy, progress = await fetched(wanted(daemon, push_id=""))
    assert map_arena(progress.arena_path, SIZE_BYTES)[:] == CONTENT
    copy.close()


async def test_a_push_that_is_replaced_is_not_read(daemon: Daemon, client: AsyncClient) -> None:
    """Its memory is another version's later."""
    _, unknown = await fetched(wanted(daemon))
    assert "NOT_FOUND" in unknown.error
    await client.push_weights(weights(1), version=1, push_id="p", action="stage")
    pulled = PulledPush(daemon.registry.live.find("p"), daemon.resident)
    assert bytes(pulled.view(0, SIZE_BYTES)) == CONTENT
    await client.commit_push("p")
    assert bytes(pulled.view(0, SIZE_BYTES)) == CONTENT
    copy, applied = await fetched(wanted(daemon))
    assert map_arena(applied.arena_path, SIZE_BYTES)[:] == CONTENT
    copy.close()
    await client.push_weights(weights(2), version=2)
    with pytest.raises(PushNotFoundError):
        pulled.view(0, SIZE_BYTES)
    with pytest.raises(PushNotFoundError):
        pulled.there(0, 1)
    _, replaced = await fetched(wanted(daemon))
    assert "NOT_FOUND" in replaced.error


async def test_a_push_that_never_gets_its_bytes_is_waited_for_until_the_deadline(
    daemon: Daemon, client: AsyncClient
) -> None:
    """What has arrived is sent."""
    layout = await client.get_weights()
    only_a = {"a": weights(1)["a"]}
    sending = asyncio.create_task(
        client.push_weights(only_a, version=1, push_id="p", layout=layout, callers=2, timeout_s=60.0)
    )
    await until(lambda: "p" in daemon.registry.live)
    pulled = PulledPush(daemon.registry.live.find("p"), daemon.resident)
    async with asyncio.timeout(STEP_S):
        while pulled.there(0, SIZE_BYTES) != (0, 16):
            await pulled.wait()
    _, progress = await fetched(wanted(daemon, timeout_s=0.5))
    assert "DEADLINE_EXCEEDED" in progress.error and not progress.arena_path
    sending.cancel()
    await asyncio.wait([sending])


def broken(
    monkeypatch: pytest.MonkeyPatch, *, after: int, times: int, error: Exception | None
) -> list[tuple[int, int]]:
    """The first streams break after so many frames; the ranges that were asked for."""
    asked: list[tuple[int, int]] = []
    frames_of = servicer_module.pull_frames

    async def frames(request: weights_pb2.PullWeightsRequest, version: Any) -> AsyncIterator[bytes]:
        asked.extend((each.start, each.end) for each in request.ranges)
        request.chunk_bytes = 5
        number = 0
        async for frame in frames_of(request, version):
            if number == after and len(asked) <= times:
                if error is not None:
                    raise error
                return
            number += 1
            yield frame

    monkeypatch.setattr(servicer_module, "pull_frames", frames)
    return asked


@pytest.mark.parametrize("error", [UnavailableError("the link broke"), None])
async def test_what_is_missing_is_asked_for_again(
    daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """After a break, or a stream that ends early."""
    asked = broken(monkeypatch, after=3, times=2, error=error)
    copy, progress = await fetched(wanted(daemon))
    assert map_arena(progress.arena_path, SIZE_BYTES)[:] == CONTENT
    assert asked == [(0, 32), (10, 32), (20, 32)]
    copy.close()


class Clock:
    """In the place of time: it moves when somebody sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


async def test_breaks_without_end_are_an_error(
    daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch, arenas: list[Arena]
) -> None:
    """When the time is over; it says what the last one was. The daemon is asked less and less often."""
    asked = broken(monkeypatch, after=1, times=99, error=UnavailableError("the link broke"))
    clock = Clock()
    monkeypatch.setattr(fetch, "time", clock)
    _, progress = await fetched(wanted(daemon, timeout_s=60.0))
    assert "no time is left" in progress.error and "the link broke" in progress.error
    assert clock.slept_s[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert 58.0 < sum(clock.slept_s) <= 60.0
    assert asked == [(0, SIZE_BYTES)] * (len(clock.slept_s) + 1)
    assert [arena.closed for arena in arenas] == [True]


async def test_a_manifest_is_as_large_as_it_is(
    daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of 140,000 tensors takes 11 MB of the first frame."""
    whole = weights_pb2.PullWeightsResponse(header=weights_pb2.PushHeader(manifest_digest="x" * (12 << 20)))
    monkeypatch.setattr("genserve.rpc.frames.pull.header_frame", lambda version: whole.SerializeToString())
    copy, progress = await fetched(wanted(daemon))
    assert map_arena(progress.arena_path, SIZE_BYTES)[:] == CONTENT
    copy.close()


async def test_proxies_of_the_environment_are_not_asked(
    daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for the internet."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    copy, progress = await fetched(wanted(daemon))
    assert progress.error == ""
    copy.close()


async def test_a_damaged_chunk_is_an_error(daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte of it is prepared."""
    monkeypatch.setattr("genserve.rpc.frames.pull.crc32c_of", lambda data: 1)
    _, progress = await fetched(wanted(daemon))
    assert "damaged" in progress.error


async def test_a_daemon_that_says_nothing_is_given_up(arenas: list[Arena]) -> None:
    """At the deadline, and its memory is given back."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        _, progress = await fetched(Fetch("n", [RANK], address, "p", SIZE_BYTES, 0.5))
    assert "DEADLINE_EXCEEDED" in progress.error
    assert [arena.closed for arena in arenas] == [True]


async def test_fetching_that_is_given_up_ends_at_once(
    daemon: Daemon, preparing: object, monkeypatch: pytest.MonkeyPatch, arenas: list[Arena]
) -> None:
    """Also while nothing comes."""
    waiting = asyncio.Event()

    async def silent(request: object, version: object) -> AsyncIterator[bytes]:
        waiting.set()
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(servicer_module, "pull_frames", silent)
    copy = FetchedBytes(RANK, wanted(daemon, timeout_s=60.0))
    async with asyncio.timeout(STEP_S):
        running = asyncio.create_task(asyncio.to_thread(copy.run))
        await waiting.wait()
        copy.close()
        await running
    assert copy.progress.done and not copy.progress.arena_path
    assert [arena.closed for arena in arenas] == [True]
