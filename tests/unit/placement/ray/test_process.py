"""The router's side of the process that talks to Ray; tests/faults/test_up_ray.py has a real one."""

import asyncio
import errno
import os
import re
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import UnauthenticatedError
from genserve.fleet.config import RouteConfig
from genserve.net import bound_socket
from genserve.placement.config import UpConfig
from genserve.placement.ray import up
from genserve.placement.ray.settings import RayConfig, Task
from genserve.placement.ray.up import RayProcess, fleet_of, ray_addresses, up_on_ray
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.unit.placement.ray.scripted_process import ScriptedProcess

CONFIG = RayConfig("head:6379", timeout_s=30.0)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedProcess:
    """The program that is started instead."""
    return ScriptedProcess(tmp_path / "scripted", monkeypatch)


async def test_the_addresses_come_as_they_change_until_it_ends(scripted: ScriptedProcess) -> None:
    """And then its exit status."""
    scripted.says(1, ["[]", '["a:1"]', '["a:1", "b:1"]'], 3)
    running = RayProcess(Task(CONFIG))
    assert [await running.next() for _ in range(4)] == [frozenset(), {"a:1"}, {"a:1", "b:1"}, None]
    assert await running.ended() == 3
    running.kill()
    assert scripted.tasks == [Task(CONFIG).to_json()]


async def test_a_process_can_be_told_to_end_and_can_be_killed(scripted: ScriptedProcess) -> None:
    """Which is what the exit status says."""
    for life, end in ((1, RayProcess.stop), (2, RayProcess.kill)):
        scripted.says(life, ["[]"], None)
        running = RayProcess(Task(CONFIG))
        assert await running.next() == frozenset()
        end(running)
        assert await running.next() is None
        assert await running.ended() == -(signal.SIGTERM if end is RayProcess.stop else signal.SIGKILL)
        running.kill()


async def test_addresses_come_again_when_nothing_changes(
    scripted: ScriptedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has not been removed because it still answered is looked at again."""
    monkeypatch.setattr(up, "INTERVAL_S", 0.01)
    scripted.says(1, ["[]"], None)
    running = RayProcess(Task(CONFIG))
    first = await running.next()
    assert first is not None
    async with aclosing(running.found(first)) as found:
        assert [await anext(found) for _ in range(3)] == [frozenset()] * 3
    running.kill()


async def test_a_lost_cluster_is_looked_for_again_and_its_replicas_stay(
    scripted: ScriptedProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it is there again, with others."""
    scripted.says(1, [], 1)
    scripted.says(2, ['["a:1"]'], 1)
    scripted.says(3, ['["b:1"]'], None)
    seen: list[frozenset[str]] = []
    async with asyncio.timeout(STEP_S), aclosing(ray_addresses(CONFIG)) as found:
        async for addresses in found:
            if not seen or seen[-1] != addresses:
                seen.append(frozenset(addresses))
            if addresses == {"b:1"}:
                break
    assert seen == [frozenset(), {"a:1"}, {"b:1"}]
    assert re.search(r"Ray at head:6379.* again in 0\.5 s", capsys.readouterr().err)
    assert len(scripted.tasks) == 3


async def test_a_cluster_that_does_not_answer_is_given_up(
    scripted: ScriptedProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its time, and looked for again."""
    scripted.says(1, [], None)
    scripted.says(2, ['["a:1"]'], None)
    seen: list[frozenset[str]] = []

    async def look() -> None:
        async with aclosing(ray_addresses(RayConfig("head:6379", timeout_s=600.0))) as found:
            async for addresses in found:
                seen.append(frozenset(addresses))
                if addresses:
                    return

    with advanced_clock() as clock:
        looking = asyncio.create_task(look())
        await until(lambda: scripted.is_running)
        assert seen == [frozenset()]
        await clock.advance(600)
        await asyncio.wait_for(looking, STEP_S)
    assert "Ray at head:6379 does not answer within 600 s" in capsys.readouterr().err


async def test_nothing_that_ends_one_look_ends_all(
    scripted: ScriptedProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are no more processes; then something is said that is no list of addresses."""
    num_started = 0

    def start(task: Task) -> RayProcess:
        nonlocal num_started
        num_started += 1
        if num_started == 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return RayProcess(task)

    monkeypatch.setattr(up, "RayProcess", start)
    scripted.says(1, ["not JSON"], None)
    scripted.says(2, ['["a:1"]'], None)
    async with asyncio.timeout(STEP_S), aclosing(ray_addresses(CONFIG)) as found:
        async for addresses in found:
            if addresses:
                break
    assert os.strerror(errno.EAGAIN) in capsys.readouterr().err
    assert len(scripted.tasks) == 2


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """As they were before, whatever the router does to them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_signals")
@pytest.mark.parametrize(
    ("lines", "process_status", "status", "says"),
    [
        ([], 2, 2, ""),
        ([], 1, 1, ""),
        (["[]"], 1, 1, ""),
        (["[]"], 0, 1, "status 0\n"),
    ],
)
async def test_the_router_ends_with_the_process_that_runs_the_replicas(
    scripted: ScriptedProcess,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    process_status: int,
    status: int,
    says: str,
) -> None:
    """And with its exit status: it has said why. It listens as soon as all replicas are placed, and not before."""
    scripted.says(1, lines, process_status)
    config = UpConfig(2, ["--seed", "1"], None, RouteConfig(port=0))
    async with asyncio.timeout(STEP_S):
        assert await up_on_ray(config, CONFIG) == status
    said = capsys.readouterr()
    assert said.err.count("\n") == says.count("\n") and said.err.endswith(says)
    assert ("genserve: routing to 2 replicas on Ray at head:6379 on 127.0.0.1:" in said.out) is bool(lines)
    assert scripted.tasks == [Task(CONFIG, fleet_of(config)).to_json()]


@pytest.mark.usefixtures("kept_signals")
async def test_a_signal_before_all_is_placed_ends_the_process_too(scripted: ScriptedProcess) -> None:
    """Which gives back what it has asked for."""
    scripted.says(1, [], None)
    running = asyncio.create_task(up_on_ray(UpConfig(1, [], None, RouteConfig(port=0)), CONFIG))
    await until(lambda: scripted.is_running)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(STEP_S):
        assert await running == 1  # as it was ended by the signal, which a real one takes


@pytest.mark.usefixtures("kept_signals")
async def test_a_process_that_says_nothing_is_given_up(
    scripted: ScriptedProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the time for Ray to answer and to place all."""
    scripted.says(1, [], None)
    config = UpConfig(1, [], None, RouteConfig(port=0))
    with advanced_clock() as clock:
        running = asyncio.create_task(up_on_ray(config, RayConfig("head:6379", timeout_s=600.0)))
        await until(lambda: scripted.is_running)
        await clock.advance(600)
        assert not running.done()
        await clock.advance(600)
        assert await asyncio.wait_for(running, STEP_S) == 1
    assert capsys.readouterr().err.startswith("genserve: Ray at head:6379 does not answer")


async def test_a_port_in_use_is_reported_before_ray_places_anything(scripted: ScriptedProcess) -> None:
    """Which may take long, and would be in vain."""
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        config = UpConfig(1, [], None, RouteConfig(port=taken.getsockname()[1]))
        with pytest.raises(OSError, match=str(config.route.port)):
            await up_on_ray(config, CONFIG)
    assert not scripted.is_running


@pytest.mark.usefixtures("kept_signals")
async def test_the_router_knows_the_callers_of_the_environment(
    scripted: ScriptedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the replicas do, which get the variable."""
    token, socket = "a-token-of-some-length", tmp_path / "socket"
    (tmp_path / "token").write_text(token)
    monkeypatch.setenv("GENSERVE_AUTH_TOKENS", f"generate:{token}")
    scripted.says(1, ["[]"], None)
    route = RouteConfig(
        port=-1, uds=str(socket), peer_token_file=str(tmp_path / "token"), environment_lists_callers=True
    )
    running = asyncio.create_task(up_on_ray(UpConfig(1, [], None, route), CONFIG))
    await until(socket.exists)
    async with asyncio.timeout(STEP_S):
        async with AsyncClient(f"unix:{socket}") as nobody, AsyncClient(f"unix:{socket}", token=token) as somebody:
            with pytest.raises(UnauthenticatedError):
                await nobody.status()
            await somebody.status()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
