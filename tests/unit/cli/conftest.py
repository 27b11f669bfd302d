"""A scripted daemon for the commands, and one that runs them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from genserve.cli import main
from tests.unit.cli.commands import Command, Outcome
from tests.unit.client.scripted_daemon import ScriptedDaemon, running_daemon


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def genserve(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command against the daemon; gives exit status, stdout and stderr."""

    async def run(*arguments: str) -> Outcome:
        status = await asyncio.to_thread(main, [*arguments, "--target", daemon.target])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run
