"""A scripted daemon for the commands, and one that runs them."""

import asyncio

import pytest

from genserve.cli import main
from tests.support.commands import Command, Outcome
from tests.support.scripted_services import ScriptedDaemon
from tests.support.scripted_services import daemon as daemon


@pytest.fixture
def genserve(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command against the daemon; gives exit status, stdout and stderr."""

    async def run(*arguments: str) -> Outcome:
        status = await asyncio.to_thread(main, [*arguments, "--target", daemon.target])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run
