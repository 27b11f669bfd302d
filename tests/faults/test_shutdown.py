"""SIGTERM in every condition: bounded by the drain timeout, and no token of weights that nobody knows."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from genserve.client import AsyncClient, Generation
from genserve.errors import DrainingError, EngineTaintedError, GenserveError, UnavailableError
from tests.support import patience
from tests.support.faulty_worker import SLOW_RUN, Fault
from tests.support.footprint import Remains
from tests.support.frontends import everywhere_of, on_port
from tests.support.subject import Subject, started
from tests.support.unchanging import unchanging

DRAIN_TIMEOUT_S = 4.0
STOP_S = 30.0
"""What the exit may take beyond the drain timeout on a loaded machine."""

LONG_S = 300.0
"""A drain timeout that no test reaches."""
NUM_FRONTENDS = 3

Starts = Callable[..., AbstractAsyncContextManager[Subject]]


@pytest.fixture
def daemon(checkpoints: dict[str, Path], tmp_path: Path) -> Starts:
    """Starts one for this test alone, with further flags."""
    flags = ["--no-resident-weights", "--drain-timeout", str(DRAIN_TIMEOUT_S)]
    return lambda *more: started(checkpoints, tmp_path, *flags, *more, begins=False)


Streaming = tuple[Generation, "asyncio.Task[None]"]


@asynccontextmanager
async def streaming(daemon: Subject, client: AsyncClient | None = None) -> AsyncIterator[Streaming]:
    """A request that is generating, and the task that reads it."""
    stream = (client or daemon.client).stream
    generation, begun = Generation(), asyncio.Event()

    async def read() -> None:
        async for delta in stream([9, 8, 7], temperature=0.0, max_tokens=1900, ignore_eos=True):
            generation.add(delta)
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    yield generation, reading
    reading.cancel()


@asynccontextmanager
async def streaming_everywhere(daemon: Subject) -> AsyncIterator[list[Streaming]]:
    """One request at the daemon's port and one at each front end."""
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(everywhere_of(daemon.process.address, NUM_FRONTENDS))
        yield [await stack.enter_async_context(streaming(daemon, each)) for each in clients]


async def end_where_they_stood(streams: Sequence[Streaming], daemon: Subject) -> None:
    """At SIGTERM they end as ABORTED, without a further token; the exit is clean."""
    nums_tokens = await unchanging(lambda: [len(generation.token_ids) for generation, _ in streams])
    status, _ = await terminated(daemon)
    for (generation, reading), num_tokens in zip(streams, nums_tokens, strict=True):
        await reading
        assert len(generation.token_ids) == num_tokens < 1900
        assert generation.sequences[0].finish_reason == "aborted"
    assert status == 0


async def terminated(daemon: Subject) -> tuple[int, float]:
    """The exit status after SIGTERM, and the seconds until then."""
    began_s = time.monotonic()
    daemon.process.process.send_signal(signal.SIGTERM)
    status = await asyncio.to_thread(daemon.process.exit_status, 60)
    return status, time.monotonic() - began_s


async def test_a_tainted_daemon_ends_without_a_further_token(daemon: Starts) -> None:
    """The frozen streams of all ports end as ABORTED where they stood."""
    async with daemon("--frontends", str(NUM_FRONTENDS)) as tainted, streaming_everywhere(tainted) as streams:
        tainted.order(SLOW_RUN, Fault("commit", after=5), Fault("rollback", after=2))
        with pytest.raises(EngineTaintedError):
            await tainted.client.push_weights(tainted.checkpoints["b"], version=1)
        await end_where_they_stood(streams, tainted)
        assert f"aborted requests of an engine that is TAINTED: {len(streams)}" in tainted.process.stderr


async def test_a_sleeping_daemon_ends_without_a_further_token(daemon: Starts) -> None:
    """Its memory is not there."""
    async with daemon() as asleep, streaming(asleep) as (generation, reading):
        asleep.order(SLOW_RUN)
        assert (await asleep.client.sleep()).phase == "sleeping"
        await end_where_they_stood([(generation, reading)], asleep)


async def test_a_pause_that_waits_for_requests_does_not_hold_a_shutdown_up(daemon: Starts) -> None:
    """Its caller is told at once, the stream finishes or is ended at the deadline, and the exit is clean."""
    async with daemon() as waiting, streaming(waiting) as (_, reading):
        waiting.order(SLOW_RUN)  # the stream goes on for a minute and a half
        pausing = asyncio.create_task(waiting.client.pause(mode="wait", timeout_s=60.0))
        async with asyncio.timeout(50), AsyncClient(waiting.process.address) as other:
            # Requests that come queue behind a pause that waits: one that gets no token shows that it has begun.
            while not pausing.done():
                try:
                    await other.generate([1], max_tokens=1, timeout_s=0.5)
                except GenserveError:
                    break
        waiting.order(Fault("run", "slow", seconds=0.2, times=-1))  # the stream would take minutes
        status, took_s = await terminated(waiting)
        with pytest.raises((DrainingError, UnavailableError)):
            await pausing
        await reading
        assert status == 0
        assert took_s < DRAIN_TIMEOUT_S + STOP_S


@pytest.mark.usefixtures("impatient")
async def test_a_push_that_hangs_does_not_hold_a_shutdown_up(daemon: Starts) -> None:
    """It is given up at the deadline; its trainer is told that the daemon goes, and the exit is clean."""
    async with daemon() as hanging:
        hanging.order(Fault("load", "hang", after=2))
        pushing = asyncio.create_task(hanging.client.push_weights(hanging.checkpoints["b"], version=1))
        await hanging.until_fired()
        status, took_s = await terminated(hanging)
        with pytest.raises((DrainingError, UnavailableError)):
            await pushing
        assert status == 0
        assert took_s < DRAIN_TIMEOUT_S + STOP_S
        assert "gave up a push" in hanging.process.stderr


@pytest.mark.long("genserve/frontends", "genserve/daemon")  # it is waited for, and then killed
async def test_a_front_end_that_stands_still_does_not_hold_a_shutdown_up(daemon: Starts) -> None:
    """It is killed; what the others have ends as ABORTED at the deadline, and the exit is clean."""
    async with daemon("--frontends", str(NUM_FRONTENDS)) as draining, streaming_everywhere(draining) as streams:
        draining.order(Fault("run", "slow", seconds=0.2, times=-1))
        remains = Remains(draining.pid)
        port = (await draining.client.server_info()).frontend_ports[0]
        on_port(draining.process, port).suspend()
        status, _ = await terminated(draining)
        assert status == 0
        assert f"front end on port {port}: it does not answer, and is killed" in draining.process.stderr
        reasons = [generation.sequences[0].finish_reason for generation, reading in streams if await settled(reading)]
        assert reasons == ["aborted"] * NUM_FRONTENDS
        assert await remains.left() == []


async def settled(reading: "asyncio.Task[None]") -> bool:
    """Whether a stream has ended as one ends, and was not cut off."""
    try:
        await reading
    except UnavailableError:
        return False
    return True


async def test_a_second_signal_exits_at_once(daemon: Starts) -> None:
    """With a status that says so, while a stream still has to finish."""
    async with daemon("--drain-timeout", str(LONG_S)) as draining, streaming(draining) as (_, reading):
        draining.order(Fault("run", "slow", seconds=0.2, times=-1))
        draining.process.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(patience.STEP_S):
            while await draining.is_serving():
                await asyncio.sleep(0.02)
        status, took_s = await terminated(draining)
        assert status == 128 + signal.SIGTERM
        assert took_s < STOP_S < LONG_S
        with pytest.raises(UnavailableError):
            await reading
