"""How `genserve generate` tells of an answer that others have ended."""

import asyncio
import os
import pty
import sys

import pytest

from genserve.cli import main
from genserve.v1 import generation_pb2
from tests.support.commands import start
from tests.support.patience import until
from tests.support.scripted_services import ScriptedDaemon


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (generation_pb2.FINISH_REASON_ABORTED, "genserve: the answer is not complete: aborted\n"),
        (generation_pb2.FINISH_REASON_PAUSED, "genserve: the answer is not complete: paused\n"),
        (generation_pb2.FINISH_REASON_LENGTH, ""),
        (generation_pb2.FINISH_REASON_TIME_LIMIT, ""),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
async def test_an_answer_that_others_have_ended_is_told_on_stderr(
    reason: generation_pb2.FinishReason,
    told: str,
    flags: list[str],
    daemon: ScriptedDaemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its text alone looks complete. What the request asked for needs no word."""
    daemon.finish_reason = reason
    assert await asyncio.to_thread(main, ["generate", "x", *flags, "--target", daemon.target]) == 0
    assert capsys.readouterr().err == told


@pytest.mark.slow
async def test_terminal_says_why_the_first_token_is_late(daemon: ScriptedDaemon) -> None:
    """While it waits, once; the answer is not mixed with it."""
    daemon.hangs_after = 0
    pause = await start(daemon.target, "pause", "--ttl", "10m", "--holder", "alice@host")
    await pause.communicate()
    terminal, stderr = pty.openpty()
    try:
        command = ("-m", "genserve", "generate", "x", "--target", daemon.target)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=stderr
        )
        os.set_blocking(terminal, False)
        said = b""

        def is_told() -> bool:
            nonlocal said
            try:
                said += os.read(terminal, 4096)
            except BlockingIOError:
                return False
            return b"\n" in said

        await until(is_told)
        daemon.goes_on.set()
        output, _ = await process.communicate()
    finally:
        os.close(terminal)
        os.close(stderr)
    assert (process.returncode, output) == (0, b"Once upon a time\n")
    assert said.decode().startswith("genserve: waiting: paused by alice@host, ")
    assert f"s left; to end the pause: genserve resume lease-1 --target {daemon.target}\r\n" in said.decode()


@pytest.mark.slow
async def test_nothing_is_said_where_a_program_reads_stderr(daemon: ScriptedDaemon) -> None:
    """It has the error's details."""
    daemon.hangs_after = 0
    await (await start(daemon.target, "pause", "--ttl", "10m")).communicate()
    process = await start(daemon.target, "generate", "x", "--timeout", "3s")
    _, errors = await process.communicate()
    assert errors.startswith(b"genserve: DEADLINE_EXCEEDED: ")
