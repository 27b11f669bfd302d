"""What systemd is told, over a real socket."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from genserve.control.conditions import DaemonCondition, EngineCondition
from genserve.control.service_manager import ServiceManager
from genserve.control.state import StateBoard
from genserve.settings.config import ServeConfig
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns
from tests.support.scripted_engine import ScriptedEngine

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "genserve.service"


@pytest.fixture
def board() -> StateBoard:
    """Of a daemon that starts."""
    return StateBoard(None, tuple, "test", DaemonCondition.STARTING)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The end of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


async def told(end: socket.socket) -> list[str]:
    """The lines of the next datagram."""
    async with asyncio.timeout(STEP_S):
        return (await asyncio.get_running_loop().sock_recv(end, 4096)).decode().splitlines()


def environment(end: socket.socket, watchdog_s: float = 0.0) -> dict[str, str]:
    """As systemd makes it."""
    watchdog = {"WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}", "WATCHDOG_PID": str(os.getpid())} if watchdog_s else {}
    return {"NOTIFY_SOCKET": end.getsockname(), **watchdog}


async def test_each_state_of_a_daemon_is_reported(board: StateBoard, manager: socket.socket) -> None:
    """From what it does before it serves to its end."""
    service = ServiceManager.from_environment(environment(manager, 600.0))
    assert service is not None
    extension, fed = "EXTEND_TIMEOUT_USEC=60000000", "WATCHDOG=1"
    running = asyncio.create_task(service.run(board))
    try:
        assert await told(manager) == ["STATUS=starting", extension, fed]
        board.tell_step("loading weights", 0.0)
        assert await told(manager) == ["STATUS=starting: loading weights", extension, fed]
        board.attach(ScriptedEngine())
        board.become(DaemonCondition.SERVING)
        assert await told(manager) == ["STATUS=running", "READY=1", fed]
        board.tell_answers(False)
        assert await told(manager) == ["STATUS=running: the engine does not answer", "READY=1"]
        board.tell_answers(True)
        assert await told(manager) == ["STATUS=running", "READY=1", fed]
        board.become(DaemonCondition.DRAINING)
        assert await told(manager) == ["STATUS=draining", "READY=1", "STOPPING=1", extension, fed]
        board.enter(EngineCondition.DEAD)
        assert await told(manager) == ["STATUS=dead", "READY=1"]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_the_watchdog_is_fed_while_nothing_changes(board: StateBoard, manager: socket.socket) -> None:
    """Three times in its period. An engine that does not answer starves it."""
    service = ServiceManager.from_environment(environment(manager, 15.0))
    assert service is not None
    board.attach(ScriptedEngine())
    board.become(DaemonCondition.SERVING)
    running = asyncio.create_task(service.run(board))
    with advanced_clock() as clock:
        for _ in range(4):
            assert "WATCHDOG=1" in await told(manager)
            await clock.advance(5.0)
        board.tell_answers(False)
        while "WATCHDOG=1" in (lines := await told(manager)):
            pass
        for _ in range(4):
            assert "WATCHDOG=1" not in lines
            await clock.advance(5.0)
            lines = await told(manager)
    running.cancel()


def test_the_variables_are_not_left_to_other_processes(manager: socket.socket) -> None:
    """They would tell the state of this service as well."""
    variables = {**environment(manager, 60.0), "HOME": "/"}
    assert ServiceManager.from_environment(variables) is not None
    assert variables == {"HOME": "/"}


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1"])
def test_without_a_manager_nothing_is_reported(address: str) -> None:
    """Nor to an address that is none of a Unix socket."""
    assert ServiceManager.from_environment({"NOTIFY_SOCKET": address}) is None


def test_a_watchdog_of_another_process_is_not_fed(board: StateBoard, manager: socket.socket) -> None:
    """systemd names the process that it watches."""
    variables = {**environment(manager, 60.0), "WATCHDOG_PID": "1"}
    service = ServiceManager.from_environment(variables)
    assert service is not None
    assert "WATCHDOG=1" not in service.message(board)


async def test_abstract_sockets_and_managers_that_are_gone(board: StateBoard) -> None:
    """The first are told too, and the second stop nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        name = f"genserve-test-{os.getpid()}"
        end.bind(f"\0{name}")
        end.setblocking(False)
        service = ServiceManager.from_environment({"NOTIFY_SOCKET": f"@{name}"})
        assert service is not None
        running = asyncio.create_task(service.run(board))
        assert (await told(end))[0] == "STATUS=starting"
    board.tell_step("loading weights", 0.0)
    await turns()
    board.become(DaemonCondition.SERVING)
    await turns()
    assert not running.done()
    running.cancel()


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """As systemd sees it, with a program that is there."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    text = UNIT.read_text().replace("/opt/genserve/bin/genserve", sys.executable)
    unit = tmp_path / "genserve.service"
    unit.write_text(re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE))  # a user that is not here
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_gives_a_drain_its_time() -> None:
    """With the defaults of the daemon, and time to end the engine; a long step is no hang."""
    values = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert float(values["TimeoutStopSec"]) >= ServeConfig().drain_timeout_s + 30
    assert float(values["WatchdogSec"]) > 300
    assert (values["Type"], values["KillMode"], values["LimitCORE"]) == ("notify", "mixed", "0")
