"""An engine that takes no calls any more is found within seconds, whatever the cause; one that is slow is not."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.errors import EngineDeadError, UnavailableError
from genserve.process.leftovers import sweep_shared_memory
from tests.support.daemon_process import BOTH_CORES
from tests.support.faulty_worker import Fault
from tests.support.footprint import Remains
from tests.support.subject import Subject, started

FLIP_S = 5.0
"""What --heartbeat-timeout says by default."""
LATE_S = 25.0
"""What a loaded machine may add."""

LONG = pytest.mark.long("genserve/engine/vllm", "genserve/worker/extension.py")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def watched_health(daemon: Subject) -> AsyncIterator[Callable[[int], "asyncio.Future[float]"]]:
    """Tells when health says this status next, on the monotonic clock."""
    seen: list[tuple[float, int]] = []
    changed = asyncio.Condition()

    async def watch() -> None:
        async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            async with changed:
                seen.append((time.monotonic(), response.status))
                changed.notify_all()

    async def when(status: int) -> float:
        async with asyncio.timeout(300), changed:
            await changed.wait_for(lambda: bool(seen) and seen[-1][1] == status)
            return seen[-1][0]

    async with grpc.aio.insecure_channel(daemon.process.address) as channel:
        watching = asyncio.create_task(watch())
        await when(SERVING)
        yield lambda status: asyncio.ensure_future(when(status))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def is_given_up(daemon: Subject, silence: Callable[[], object], *, flags_timeout_s: float = FLIP_S) -> None:
    """After `silence` health flips on time, a stream and a pending call end as UNAVAILABLE, the exit status says
    failure, and no process is left."""
    remains = Remains(daemon.pid)
    async with watched_health(daemon) as when:
        stream = daemon.client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True)
        await anext(stream)
        began_s = time.monotonic()
        silence()
        pending = asyncio.create_task(daemon.client.pause(mode="wait", timeout_s=60.0))
        flipped_s = await when(NOT_SERVING) - began_s
        with pytest.raises((EngineDeadError, UnavailableError)):
            async for _ in stream:
                pass
        with pytest.raises((EngineDeadError, UnavailableError)):
            await pending
        status = await asyncio.to_thread(daemon.process.exit_status, 60)
        print(f"health flipped after {flipped_s:.1f} s, the daemon exited after {time.monotonic() - began_s:.1f} s")
    assert flipped_s < flags_timeout_s + LATE_S
    assert status == 1
    await remains.left()
    # What ranks share lies in /dev/shm until the next daemon starts: what was stopped could only be killed.
    await asyncio.to_thread(sweep_shared_memory, min_age_s=0.0)
    assert await remains.left() == []
    assert "\ngenserve: error: giving up the engine" in daemon.process.stderr
    assert "Traceback" not in daemon.process.stderr.split("giving up the engine", 1)[1]


async def test_a_stopped_engine_core_is_given_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """SIGSTOP: it is alive to the system, and answers nothing. The stream is that of a front end."""
    async with started(checkpoints, tmp_path, "--frontends", "2", begins=False) as daemon:
        await daemon.client.wait_ready()  # it spreads its requests then
        assert len((await daemon.client.server_info()).frontend_ports) == 2
        core = daemon.process.descendant("EngineCore")
        await is_given_up(daemon, lambda: core.send_signal(signal.SIGSTOP))


@LONG
async def test_a_stopped_rank_is_given_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The other rank waits for it, and so does EngineCore."""
    flags = ("--tensor-parallel-size", "2")
    async with started(checkpoints, tmp_path, *flags, env=BOTH_CORES, begins=False) as daemon:
        workers = psutil.Process(daemon.process.descendant("EngineCore").pid).children()
        ranks = [p for p in workers if "TP1" in p.name() or "TP1" in "".join(p.cmdline())]
        await is_given_up(daemon, lambda: os.kill((ranks or workers)[-1].pid, signal.SIGSTOP))


async def test_an_engine_that_reads_no_calls_is_given_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its input thread has ended, as it does at a message that it cannot decode; what it has taken runs on."""
    async with started(checkpoints, tmp_path, begins=False) as daemon:

        def deafen() -> None:
            # Slow, so that the stream does not end before it is ended.
            daemon.order(Fault("run", "slow", seconds=0.02, times=-1))
            os.kill(daemon.pid, signal.SIGUSR1)

        await is_given_up(daemon, deafen)
        assert "does not read calls" in daemon.process.stderr


@LONG  # tests/unit/engine/vllm/test_heartbeat.py has this with an engine that is none
async def test_what_takes_long_is_no_silence(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A preparation, a commit and digests that take longer than the timeout; health serves all the time. A step that
    does is another thing: health says so until it has ended."""
    async with started(checkpoints, tmp_path, "--heartbeat-timeout", "4", begins=False) as daemon:
        async with watched_health(daemon) as when:
            flipped = when(NOT_SERVING)
            for fault in (Fault("load", "slow", after=2, seconds=5.0), Fault("commit", "slow", after=3, seconds=5.0)):
                daemon.order(fault)
                version = (await daemon.client.get_weights()).weight_version + 1
                await daemon.client.push_weights(daemon.checkpoints["b"], version=version)
            daemon.order(Fault("digests", "slow", seconds=5.0))
            await daemon.client.get_weights(include_digests=True)
            assert daemon.fired == 1
            assert not flipped.done()
            daemon.order(Fault("run", "compute", seconds=6.5))
            generation = asyncio.create_task(daemon.client.generate([1, 2, 3], max_tokens=3, ignore_eos=True))
            await flipped
            await when(SERVING)
            assert len((await generation).token_ids) == 3
            daemon.release()
        assert "the engine answers again" in daemon.process.stderr
