"""Pushes by the ranks of a trainer, whose DTensors each have a part: two real processes with torch.distributed."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.settings.config import ServeConfig
from tests.rpc.rank import NUM_RANKS, Model, stepped, weights
from tests.support.scripted_daemon import Daemon, serving
from tests.support.warm import process

Answers = list[list[dict[str, Any]]]


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    """One that takes any tensors."""
    async with serving(ServeConfig(port=0), checkpoint=None, max_staging_bytes=1 << 20) as running:
        yield running


async def run(scenario: str, daemon: Daemon, store: Path, statuses: tuple[int, ...] = (0, 0)) -> Answers:
    """What each rank was answered."""

    async def rank(number: int) -> list[dict[str, Any]]:
        program = [sys.executable, "-m", "tests.rpc.rank", scenario, daemon.address, str(store / "store"), str(number)]
        done = await asyncio.to_thread(process.run, program, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == statuses[number], done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return list(await asyncio.gather(*(rank(number) for number in range(NUM_RANKS))))


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """As the engine holds them."""
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


@pytest.mark.slow
async def test_every_placement_arrives_and_nothing_is_sent_twice(daemon: Daemon, tmp_path: Path) -> None:
    """Rows, also of uneven numbers and none; columns; what all ranks have alike, which one of them sends. All ranks get
    the outcome, also that of a repeat."""
    answers = await run("placements", daemon, tmp_path)
    assert [[each["version"] for each in rank] for rank in answers] == [[1, 2, 2]] * 2
    expected = contents(weights(2))
    assert daemon.engine.live == expected
    assert daemon.engine.calls.count("commit_weights 1") == daemon.engine.calls.count("commit_weights 2") == 1
    total_bytes = sum(map(len, expected.values()))
    for push in (0, 1):
        sent = [rank[push]["sent"] for rank in answers]
        assert sum(sent) == total_bytes
        assert min(sent) > total_bytes // 4


@pytest.mark.slow
async def test_a_module_of_fsdp_is_pushed_as_it_is(daemon: Daemon, tmp_path: Path) -> None:
    """Tied weights once; a buffer, which is no DTensor, by one rank."""
    answers = await run("fsdp", daemon, tmp_path)
    assert [[each["version"] for each in rank] for rank in answers] == [[1, 2]] * 2
    whole = stepped(Model()).state_dict()
    del whole["head.weight"]
    assert daemon.engine.live == contents(whole)
    assert sum(rank[0]["sent"] for rank in answers) == sum(map(len, contents(whole).values()))


@pytest.mark.slow
async def test_what_cannot_be_sent_as_it_lies_is_refused_by_name(daemon: Daemon, tmp_path: Path) -> None:
    """On every rank and before anything is sent, with what to do about it; done, it is sent."""
    for many, partial, nameless, redistributed in await run("refused", daemon, tmp_path):
        assert (many["error"], partial["error"], nameless["error"]) == ("ValueError", "ValueError", "InvalidFieldError")
        assert many["message"].startswith("rows: what this rank has of it lies in 10000 pieces of 4 bytes")
        assert partial["message"].startswith("sum: ")
        assert "redistribute" in many["message"] and "redistribute" in partial["message"]
        assert "push_id" in nameless["message"]
        assert redistributed["version"] == 1
    assert daemon.engine.live == contents({"rows": torch.arange(20000.0)})


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["other_version", "other_tensors"])
async def test_ranks_that_disagree_are_reported(daemon: Daemon, tmp_path: Path, scenario: str) -> None:
    """The one that came second at once, the one that waits for it at its deadline. Nothing is applied."""
    errors = sorted(rank[0]["error"] for rank in await run(scenario, daemon, tmp_path))
    assert errors == ["DeadlineError", "PushConflictError"]
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})


@pytest.mark.slow
async def test_rank_that_dies_leaves_the_weights_as_they_were(daemon: Daemon, tmp_path: Path) -> None:
    """The others are told what is missing; the next push is as any other."""
    (alone,), _ = await run("dies", daemon, tmp_path, (0, 9))
    assert alone["error"] == "DeadlineError"
    assert "nothing was applied" in alone["message"]
    assert "experts" in alone["message"]
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})
    (tmp_path / "store").unlink()
    await run("placements", daemon, tmp_path)
    assert daemon.engine.live == contents(weights(2))
