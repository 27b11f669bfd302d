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
from genserve.launcher.daemon_process import DaemonProcess
from genserve.launcher.process_group import members_of
from genserve.placement.replica import LocalReplica
from genserve.placement.shares import ProcessShare
from genserve.process import supervisor
from genserve.process.signals import Stopped
from tests.support import fake_daemon
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.said import Said

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
    return lambda model, served, **times: LocalReplica(0, ["--model", model], share, router, served, **times)


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


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


async def test_a_replica_is_known_to_the_router_while_it_serves(router: Router, replica: Makes) -> None:
    """It drains when it is told to, and stays known until then: requests that run go on."""
    any_served = asyncio.Event()
    served = replica("whatever", any_served)
    running = asyncio.create_task(served.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    assert any_served.is_set()
    running.cancel()
    await asyncio.wait({running})
    assert ADDRESS in router.fleet.upstreams
    assert await served.stop(STEP_S)


async def test_a_replica_that_starts_is_known_to_the_router(router: Router, replica: Makes) -> None:
    """Which shows its steps, for minutes perhaps."""
    any_served = asyncio.Event()
    starting = replica("that listens and that never serves", any_served)
    running = asyncio.create_task(starting.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    assert not any_served.is_set()
    running.cancel()
    await asyncio.wait({running})
    await starting.stop(STEP_S)


async def test_a_replica_whose_start_fails_is_not_known_any_more(
    router: Router, replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next start listens, elsewhere perhaps."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 2)
    failing = replica("that listens and exits", asyncio.Event())
    await failing.run()
    assert "no memory" in str(failing.failure)
    assert ADDRESS not in router.fleet.upstreams
    assert said.count("started again") == 1


async def test_a_replica_that_ends_is_removed_and_started_again(
    router: Router, replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later each time, with its last words for people."""
    failing = replica("that fails later", asyncio.Event())
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
    drained = replica("that is drained", asyncio.Event())
    running = asyncio.create_task(drained.run())
    await until(lambda: said.count("started again"))
    running.cancel()
    await asyncio.wait({running})
    assert "status 0; it is started again in 0.5 s\n" in said.text


@pytest.mark.slow
async def test_a_replica_that_cannot_start_is_given_up(
    replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the words of its last start. What is wrong is likely to be wrong with all, as long as none has served."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)
    failing = replica("that exits", asyncio.Event())
    await failing.run()
    assert failing.is_down and str(failing.failure).endswith("status 1: no such model")
    told = re.findall(r"^replica 0: the daemon ended with status 1: no such model(.*)$", "\n".join(said.lines), re.M)
    assert told == [f"; it is started again in {wait_s} s" for wait_s in (0.01, 0.02, 0.04, 0.08)]
    why = r"no replica can be started: the daemon ended with status 1: no such model, 5 times within \d+ s"
    assert re.fullmatch(why, said.lines[-1])


@pytest.mark.slow
async def test_a_replica_is_not_given_up_when_one_has_served(
    replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others serve meanwhile, and what is wrong with this one may pass."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.001)
    any_served = asyncio.Event()
    any_served.set()
    failing = replica("that exits", any_served)
    running = asyncio.create_task(failing.run())
    await until(lambda: said.count("started again") > supervisor.MAX_DEATHS)
    running.cancel()
    await asyncio.wait({running})
    assert not failing.is_down


async def test_a_daemon_that_hangs_at_its_start_is_given_up(
    replica: Makes, made: list[DaemonProcess], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it has started. Until then people are told what is waited for."""
    times = {"start_timeout_s": 500.0, "tell_after_s": 200.0}
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    hanging = replica("with a child that never serves", asyncio.Event(), **times)
    with advanced_clock() as clock:
        running = asyncio.create_task(hanging.run())
        await until(lambda: said.count("starting the engine") and len(processes_of(made[0])) == 2)
        for num_told in (1, 2):
            await clock.advance(200)
            await until(lambda num_told=num_told: said.count("does not serve") == num_told)  # type: ignore[misc]
        await clock.advance(100)
        await running
        assert "500 s (--start-timeout): starting the engine" in str(hanging.failure)
    assert processes_of(made[0]) == []
    told = (
        r"^genserve: replica 0: .*after (\d+) s, .*500 s \(--start-timeout\); .*: starting the engine for with a child"
    )
    assert re.findall(told, said.text, re.MULTILINE) == ["200", "400"]


async def test_a_daemon_that_hangs_is_started_again_later_each_time(
    router: Router, replica: Makes, made: list[DaemonProcess], said: Said
) -> None:
    """If another one has served. A start that fails after minutes, as of a large model, is no long life."""
    any_served = asyncio.Event()
    any_served.set()
    hanging = replica("that never serves", any_served, start_timeout_s=600.0, tell_after_s=600.0)
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


async def test_replica_that_cannot_start_for_a_while_does_not_end_the_others(
    router: Router, replica: Makes, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left open by the starts that failed."""
    failing = replica("that fails later", asyncio.Event())
    running = asyncio.create_task(failing.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    await until(lambda: ADDRESS not in router.fleet.upstreams)

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", no_more)
        await until(lambda: said.count("[Errno 24]") == 2)
        # The router tries to reach the one that has ended, and has a socket for that now and then.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    await asyncio.wait({running})
    await failing.stop(STEP_S)


async def test_last_words_are_complete_however_slowly_they_are_read(
    replica: Makes, made: list[DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stderr may be a slow terminal: why the daemon has ended is told all the same."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    failing = replica("that exits", asyncio.Event())

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            if made:
                wait({made[-1].serving}, STEP_S)
            return super().write(data)

    monkeypatch.setattr("genserve.placement.output.READ_BYTES", 16)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Slow()))
    await failing.run()
    assert str(failing.failure).endswith("status 1: no such model")


async def test_a_replica_that_does_not_end_is_killed(
    router: Router, replica: Makes, made: list[DaemonProcess], said: Said
) -> None:
    """When its time is over, and people are told."""
    deaf = replica("that ignores SIGTERM", asyncio.Event())
    running = asyncio.create_task(deaf.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    assert not await deaf.stop(0.2)
    assert said.count("was killed") == 1
    assert processes_of(made[0]) == []


async def test_a_replica_that_starts_ends_in_order(replica: Makes, made: list[DaemonProcess], said: Said) -> None:
    """What it has started may not know yet that it is to end, and is killed."""
    starting = replica("with a child that never serves", asyncio.Event())
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
    with_child = replica("with a child", asyncio.Event())
    running = asyncio.create_task(with_child.run())
    await until(lambda: ADDRESS in router.fleet.upstreams)
    running.cancel()
    assert len(processes_of(made[0])) == 2
    with_child.kill()
    await asyncio.to_thread(with_child.wait_killed)
    assert processes_of(made[0]) == []
