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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from genserve.fleet.config import RouteConfig
from genserve.fleet.router import Router
from genserve.fleet.serve import start_router
from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess
from genserve.launcher.process_group import members_of
from genserve.placement.backoff import Starts
from genserve.placement.replica import LocalReplica
from genserve.placement.shares import ProcessShare
from genserve.signals import Stopped
from tests.support import fake_daemon
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until

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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DaemonProcess]:
    """The daemons that replicas start."""
    made: list[DaemonProcess] = []

    def start(*args: Any, **kwargs: Any) -> DaemonProcess:
        made.append(DaemonProcess(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("genserve.placement.replica.DaemonProcess", start)
    return made


def processes_of(daemon: DaemonProcess) -> list[int]:
    """The daemon's process, and those that it has started."""
    return members_of(daemon.process.pid)


@dataclass
class Said:
    """What people were told so far."""

    capfd: pytest.CaptureFixture[str]
    text: str = ""

    def count(self, words: str) -> int:
        """How often they were told this."""
        self.text += self.capfd.readouterr().err
        return self.text.count(words)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


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
    assert await served.stop(STEP_S)


async def test_a_replica_that_starts_is_known_to_the_router(router: Router, replica: Makes) -> None:
    """Which shows its steps, for minutes perhaps."""
    starts = Starts()
    starting = replica("that listens and that never serves", starts)
    running = asyncio.create_task(starting.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    assert not starts.has_served
    running.cancel()
    await asyncio.wait({running})
    await starting.stop(STEP_S)


async def test_a_replica_whose_start_fails_is_not_known_any_more(router: Router, replica: Makes, said: Said) -> None:
    """Until the next start listens, elsewhere perhaps."""
    failing = replica("that listens and exits", Starts(max_failed=2))
    with pytest.raises(DaemonFailedError, match="no memory"):
        await failing.run()
    assert ADDRESS not in router.fleet.upstreams
    assert said.count("started again") == 1


async def test_a_replica_that_ends_is_removed_and_started_again(
    router: Router, replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later each time, with its last words for people."""
    failing = replica("that fails later", Starts())
    running = asyncio.create_task(failing.run())
    seen: list[str] = []
    for name in ("add", "remove"):
        act = getattr(router.fleet, name)
        monkeypatch.setattr(router.fleet, name, lambda upstream, name=name, act=act: (seen.append(name), act(upstream)))
    await until(lambda: said.count("started again") == 2)
    running.cancel()
    await asyncio.wait({running})
    assert seen[:2] == ["add", "remove"]
    told = r"^genserve: replica 0: .*status 3: the engine has died; .*started again in (\S+) s$"
    assert re.findall(told, said.text, re.MULTILINE) == ["0.5", "1"]


async def test_a_replica_that_somebody_drains_is_started_again(replica: Makes, said: Said) -> None:
    """What it said last is no reason for its end."""
    drained = replica("that is drained", Starts())
    running = asyncio.create_task(drained.run())
    await until(lambda: said.count("started again"))
    running.cancel()
    await asyncio.wait({running})
    assert "status 0; it is started again in 0.5 s\n" in said.text


async def test_a_replica_that_cannot_start_is_given_up(replica: Makes, said: Said) -> None:
    """With the words of its last start."""
    with pytest.raises(DaemonFailedError, match=r"status 1: no such model$"):
        await replica("that exits", Starts(max_failed=2)).run()
    assert said.count("started again") == 1


async def test_a_daemon_that_hangs_at_its_start_is_given_up(
    replica: Makes, made: list[DaemonProcess], said: Said
) -> None:
    """With all that it has started. Until then people are told what is waited for."""
    times = {"start_timeout_s": 500.0, "tell_after_s": 200.0}
    hanging = replica("with a child that never serves", Starts(max_failed=1), **times)
    with advanced_clock() as clock:
        running = asyncio.create_task(hanging.run())
        await until(lambda: said.count("starting the engine") and len(processes_of(made[0])) == 2)
        for num_told in (1, 2):
            await clock.advance(200)
            await until(lambda num_told=num_told: said.count("does not serve") == num_told)  # type: ignore[misc]
        await clock.advance(100)
        with pytest.raises(DaemonFailedError, match=r"500 s \(--start-timeout\): starting the engine"):
            await running
    assert processes_of(made[0]) == []
    told = (
        r"^genserve: replica 0: .*after (\d+) s, .*500 s \(--start-timeout\); .*: starting the engine for with a child"
    )
    assert re.findall(told, said.text, re.MULTILINE) == ["200", "400"]


async def test_a_daemon_that_hangs_is_started_again_later_each_time(
    router: Router, replica: Makes, made: list[DaemonProcess], said: Said
) -> None:
    """If another one has served. A start that fails after minutes, as of a large model, is no long life."""
    hanging = replica("that never serves", Starts(has_served=True), start_timeout_s=600.0, tell_after_s=600.0)
    with advanced_clock() as clock:
        running = asyncio.create_task(hanging.run())
        for num_started, wait_s in ((1, 0.5), (2, 1.0), (3, 2.0)):
            await until(lambda num=num_started: len(made) == num)  # type: ignore[misc]
            assert said.count("started again") == num_started - 1
            await clock.advance(600)
            await until(lambda num=num_started: said.count("started again") == num)  # type: ignore[misc]
            await clock.advance(wait_s)
    running.cancel()
    await asyncio.wait({running})
    assert await hanging.stop(STEP_S)
    assert re.findall(r"started again in (\S+) s", said.text) == ["0.5", "1", "2"]
    assert not router.fleet.upstreams


async def test_a_replica_that_cannot_be_started_for_a_while_does_not_end_the_others(
    router: Router, replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left open by the starts that failed."""
    failing = replica("that fails later", Starts())
    running = asyncio.create_task(failing.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    await until(lambda: ADDRESS not in router.fleet.upstreams)

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", no_more)
        await until(lambda: said.count("[Errno 24]") == 2)
        assert len(os.listdir("/proc/self/fd")) <= before
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    await asyncio.wait({running})
    await failing.stop(STEP_S)


async def test_last_words_are_complete_however_slowly_they_are_read(
    replica: Makes, made: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stderr may be a slow terminal: why the daemon has ended is told all the same."""
    failing = replica("that exits", Starts(max_failed=1))

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            if made:
                wait({made[-1].serving}, STEP_S)
            return super().write(data)

    monkeypatch.setattr("genserve.placement.output._READ_BYTES", 16)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Slow()))
    with pytest.raises(DaemonFailedError, match=r"status 1: no such model$"):
        await failing.run()


async def test_a_replica_that_does_not_end_is_killed(
    router: Router, replica: Makes, made: list[DaemonProcess], said: Said
) -> None:
    """When its time is over, and people are told."""
    deaf = replica("that ignores SIGTERM", Starts())
    running = asyncio.create_task(deaf.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    assert not await deaf.stop(0.2)
    assert said.count("was killed") == 1
    assert processes_of(made[0]) == []


async def test_a_replica_that_starts_ends_in_order(replica: Makes, made: list[DaemonProcess], said: Said) -> None:
    """What it has started may not know yet that it is to end, and is killed."""
    starting = replica("with a child that never serves", Starts())
    running = asyncio.create_task(starting.run())
    await until(lambda: made and len(processes_of(made[0])) == 2)
    running.cancel()
    assert await starting.stop(0.2)
    assert processes_of(made[0]) == []
    assert said.count("was killed") == 0


async def test_a_replica_that_is_killed_leaves_nothing(
    router: Router, replica: Makes, made: list[DaemonProcess]
) -> None:
    """Its children included."""
    with_child = replica("with a child", Starts())
    running = asyncio.create_task(with_child.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    assert len(processes_of(made[0])) == 2
    with_child.kill()
    await asyncio.to_thread(with_child.wait_killed)
    assert processes_of(made[0]) == []
