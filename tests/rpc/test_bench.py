"""`genserve bench push` and `pause` against the real push and pause code."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from genserve.cli import main
from genserve.control.conditions import Phase
from tests.support.scripted_daemon import Daemon, update


async def bench(daemon: Daemon, *arguments: str) -> int:
    """Runs `genserve bench` in a thread of its own."""
    return await asyncio.to_thread(main, ["bench", *arguments, "--target", daemon.address])


async def test_generate_measures_over_one_call(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """As many requests as it is told, and no more of them at once."""
    answered = most = 0

    async def answer() -> None:
        nonlocal answered, most
        while await daemon.engine.submitted.wait():
            daemon.engine.submitted.clear()
            most = max(most, len(daemon.engine.streams) - answered)
            for stream in daemon.engine.streams[answered:]:
                stream.put(update(5, first=True))
                stream.put(update(6, last=True))
                answered += 1

    answering = asyncio.create_task(answer())
    try:
        flags = ["--many", "--concurrency", "3", "--requests", "7", "--json"]
        assert await bench(daemon, "generate", *flags) == 0
    finally:
        answering.cancel()
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["requests"] == 7
    assert row["client_cpu_us_per_token"] > 0
    assert answered == 1 + 7  # one warms up
    assert 1 <= most <= 3


@pytest.mark.slow
async def test_push_measures_and_leaves_nothing_behind(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it stages it discards, or the daemon would have no room for the last rounds; what is served stays."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(8, dtype=torch.bfloat16)}, path)
    assert await bench(daemon, "push", str(path), "--rounds", "40", "--streams", "2", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["GB"] == pytest.approx(32e-9)
    assert 0 < row["worst_GB_per_s"] <= row["GB_per_s"] <= row["best_GB_per_s"]
    assert daemon.engine.weight_version == 0


async def test_push_of_other_tensors_is_refused(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As any push: with the names."""
    path = tmp_path / "m.safetensors"
    save_file({"c": torch.zeros(4)}, path)
    assert await bench(daemon, "push", str(path)) == 1
    assert "MANIFEST_MISMATCH" in capsys.readouterr().err


async def test_pause_measures_and_leaves_the_engine_running(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """No lease is left."""
    assert await bench(daemon, "pause", "--rounds", "3") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert "pause p50 ms" in header
    assert row.split()[0] == "3"
    assert daemon.board.phase is Phase.RUNNING
