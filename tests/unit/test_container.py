"""The image of the daemon, as far as it can be checked without building it."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.rpc.server import DaemonServer
from genserve.settings.config import ServeConfig
from tests.support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\s*\\\n\s*", " ", (ROOT / "deploy" / "Containerfile").read_text())
"""With each instruction in one line."""


def instructions(name: str) -> list[str]:
    """What follows the name of an instruction."""
    return re.findall(rf"^{name} (.*)$", TEXT, re.MULTILINE)


def test_what_is_copied_is_in_the_checkout() -> None:
    """And is all that the package is built of."""
    copied = [each.split()[:-1] for each in instructions("COPY") if "--from" not in each]
    sources = {source for each in copied for source in each}
    assert all((ROOT / source).exists() for source in sources)
    assert sources >= {"pyproject.toml", "README.md", "LICENSE", "genserve", "requirements.lock"}


def test_the_daemon_gets_signals_and_no_privileges() -> None:
    """No shell stands between, nobody is root, and it listens where only its own container reaches it unless it is told
    otherwise."""
    (entry,) = instructions("ENTRYPOINT")
    program, command, *flags = json.loads(entry)
    assert (Path(program).name, command) == ("genserve", "serve")
    assert flags == ["--uds", "/run/genserve/grpc.sock"]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert int(instructions("USER")[-1]) > 0
    assert instructions("CMD") == []


@pytest.mark.slow
async def test_the_health_check_asks_the_standard_service(tmp_path: Path) -> None:
    """Status 0 while health says SERVING, and otherwise another one."""
    (check,) = instructions("HEALTHCHECK")
    _, *arguments = json.loads(check.partition(" CMD ")[2])
    command = [sys.executable, *(each.replace("/run/genserve", str(tmp_path)) for each in arguments)]
    board = StateBoard(None, tuple, "test", DaemonCondition.STARTING)
    server = await DaemonServer.open(ServeConfig(port=-1, uds=str(tmp_path / "grpc.sock")), board)
    try:
        assert await status_of(command) == 1
        board.attach(ScriptedEngine())
        board.become(DaemonCondition.SERVING)
        assert await status_of(command) == 0
    finally:
        await server.stop(0)
    assert await status_of(command) == 1


async def status_of(command: list[str]) -> int:
    """As the container engine runs it."""
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    return await asyncio.wait_for(process.wait(), 60)
