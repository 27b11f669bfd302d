"""How `genserve generate` tells of an answer that others have ended."""

import asyncio

import pytest

from genserve.cli import main
from genserve.v1 import generation_pb2
from tests.unit.client.scripted_daemon import ScriptedDaemon


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
