"""A daemon that is started again, with a program in its place; tests/faults/test_up.py has real ones."""

import asyncio
import errno
import io
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import wait
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from genserve.fleet.config import RouteConfig
from genserve.fleet.router import Router
from genserve.fleet.serve import start_router
from genserve.launcher.daemon_process import DaemonFailedError
from genserve.launcher.process_group import members_of
from genserve.placement.backoff import RestartBackoff, Starts
from genserve.placement.replica import LocalReplica
from genserve.placement.shares import ProcessShare
from genserve.signals import Stopped
from tests.support import fake_daemon

ADDRESS = "127.0.0.1:9"

Makes = Callable[..., LocalReplica]


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """One that has no replica."""
    async with AsyncExitStack() as stack:
        yield (await start_router(RouteConfig(port=0), stack, Stopped())).router


@pytest.fixture
def replica(router: Router, tmp_path: Path) -> Makes:
    """A replica of a model that decides what its daemon does."""
    share = ProcessShare(fake_daemon.install(tmp_path / "fake"))
    return lambda model, starts, **times: LocalReplica(0, ["--model", model], share, router, starts, **times)


async def test_a_replica_is_known_to_the_router_while_it_serves(router: Router, replica: Makes) -> None:
    """It drains when it is told to, and stays known until then: requests that run go on."""
    starts = Starts()
    served = replica("whatever", starts)
    running = asyncio.create_task(served.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    assert starts.has_served
    running.cancel()
    await asyncio.wait({running})
    assert ADDRESS in router.fleet.upstreams
    assert await served.stop(10.0)


async def test_a_replica_that_ends_is_removed_and_started_again(
    router: Router, replica: Makes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later each time, with its last words for people."""
    failing = replica("that fails later", Starts())
    running = asyncio.create_task(failing.run())
    seen: list[str] = []
    for name in ("add", "remove"):
        act = getattr(router.fleet, name)
        monkeypatch.setattr(router.fleet, name, lambda upstream, name=name, act=act: (seen.append(name), act(upstream)))
    said = ""

    def twice() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("started again") == 2

    await until(twice)
    running.cancel()
    await asyncio.wait({running})
    assert seen[:2] == ["add", "remove"]
    told = "genserve: replica 0: the daemon ended with status 3: the engine has died; it is started again in {} s"
    assert re.findall("^genserve: replica 0: .*$", said, re.MULTILINE) == [told.format("0.5"), told.format("1")]


async def test_a_replica_that_somebody_drains_is_started_again(
    replica: Makes, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it said last is no reason for its end."""
    drained = replica("that is drained", Starts())
    running = asyncio.create_task(drained.run())
    said = ""

    def once() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "started again" in said

    await until(once)
    running.cancel()
    await asyncio.wait({running})
    assert "genserve: replica 0: the daemon ended with status 0; it is started again in 0.5 s\n" in said


async def test_a_replica_that_cannot_start_is_given_up(replica: Makes, capfd: pytest.CaptureFixture[str]) -> None:
    """With the words of its last start."""
    with pytest.raises(DaemonFailedError, match=r"^the daemon ended with status 1: no such model$"):
        await replica("that exits", Starts(max_failed=2)).run()
    assert capfd.readouterr().err.count("started again") == 1


async def test_a_daemon_that_hangs_at_its_start_is_given_up(replica: Makes, capfd: pytest.CaptureFixture[str]) -> None:
    """With all that it has started. Until then people are told what is waited for."""
    times = {"start_timeout_s": 5.0, "tell_after_s": 2.0}
    hanging = replica("with a child that never serves", Starts(max_failed=1), **times)
    with pytest.raises(DaemonFailedError, match=r"^the daemon did not serve within 5 s \(--start-timeout\): start"):
        await hanging.run()
    process = hanging._process
    assert process is not None
    assert members_of(process.process.pid) == []
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("genserve: replica 0: ")]
    waits = "genserve: replica 0: the daemon does not serve after {} s, and may take 5 s (--start-timeout); "
    said = "it last said: genserve: starting the engine for with a child that never serves"
    assert told == [waits.format(seconds) + said for seconds in (2, 4)]


async def test_a_daemon_that_hangs_is_started_again(
    router: Router, replica: Makes, capfd: pytest.CaptureFixture[str]
) -> None:
    """If another one has served."""
    hanging = replica("that never serves", Starts(has_served=True), start_timeout_s=0.2)
    running = asyncio.create_task(hanging.run())
    said = ""

    def again() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("started again") == 2

    await until(again)
    running.cancel()
    await asyncio.wait({running})
    assert await hanging.stop(10.0)
    assert not router.fleet.upstreams


async def test_a_start_that_takes_long_and_fails_is_no_long_life(
    replica: Makes, capfd: pytest.CaptureFixture[str]
) -> None:
    """A large model fails after minutes: it waits longer each time all the same."""
    failing = replica("that exits", Starts(max_failed=3))
    failing._backoff = RestartBackoff(long_life_s=0.01)
    with pytest.raises(DaemonFailedError):
        await failing.run()
    assert re.findall(r"started again in (\S+) s", capfd.readouterr().err) == ["0.5", "1"]


async def test_a_replica_that_cannot_be_started_for_a_while_does_not_end_the_others(
    router: Router, replica: Makes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left open by the starts that failed."""
    failing = replica("that fails later", Starts())
    running = asyncio.create_task(failing.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    await until(lambda: ADDRESS not in router.fleet.upstreams)
    said = ""

    def refused() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("the daemon cannot be started: [Errno 24]") == 2

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", no_more)
        await until(refused)
        assert len(os.listdir("/proc/self/fd")) <= before
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    await asyncio.wait({running})
    await failing.stop(10.0)


async def test_last_words_are_complete_however_slowly_they_are_read(
    replica: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stderr may be a slow terminal: why the daemon has ended is told all the same."""
    failing = replica("that exits", Starts(max_failed=1))

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            process = failing._process
            if process is not None:
                wait({process.serving}, 30)
            return super().write(data)

    monkeypatch.setattr("genserve.placement.output._READ_BYTES", 16)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Slow()))
    with pytest.raises(DaemonFailedError, match=r"^the daemon ended with status 1: no such model$"):
        await failing.run()


async def test_a_replica_that_does_not_end_is_killed(
    router: Router, replica: Makes, capfd: pytest.CaptureFixture[str]
) -> None:
    """When its time is over, and people are told."""
    deaf = replica("that ignores SIGTERM", Starts())
    running = asyncio.create_task(deaf.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    process = deaf._process
    assert process is not None
    running.cancel()
    assert not await deaf.stop(0.2)
    assert "genserve: replica 0: the daemon, or a process of it, did not end by itself" in capfd.readouterr().err
    assert members_of(process.process.pid) == []


async def test_a_replica_that_starts_ends_in_order(replica: Makes, capfd: pytest.CaptureFixture[str]) -> None:
    """What it has started may not know yet that it is to end, and is killed."""
    starting = replica("with a child that never serves", Starts())
    running = asyncio.create_task(starting.run())
    await until(lambda: starting._process is not None and len(members_of(starting._process.process.pid)) == 2)
    running.cancel()
    assert await starting.stop(0.2)
    process = starting._process
    assert process is not None
    assert members_of(process.process.pid) == []
    assert "was killed" not in capfd.readouterr().err


async def test_a_replica_that_is_killed_leaves_nothing(router: Router, replica: Makes) -> None:
    """Its children included."""
    with_child = replica("with a child", Starts())
    running = asyncio.create_task(with_child.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    process = with_child._process
    assert process is not None
    running.cancel()
    assert len(members_of(process.process.pid)) == 2
    with_child.kill()
    await asyncio.to_thread(with_child.wait_killed)
    assert members_of(process.process.pid) == []


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    await until(lambda: holds())
