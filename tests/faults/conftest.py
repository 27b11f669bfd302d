"""One daemon for all faults that it has to survive; rows that end a daemon start their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.client.weights import upload
from tests.support import models
from tests.support.oracle import NUM_WARMING_STREAMS
from tests.support.subject import Kept, Subject


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny checkpoints of one architecture with different weights."""
    directory = tmp_path_factory.mktemp("checkpoints")
    a = models.tiny_qwen3(directory / "a", seed=0)
    return {"a": a, "b": models.perturbed(a, directory / "b", seed=1, scale=0.5)}


MAX_ACTIVE = 1024
"""Requests that may wait or run at the daemon of most tests: more come than this."""


def num_staging_bytes(checkpoint: Path) -> int:
    """Room for the bytes that are served, and two pushes and a half."""
    return sum(int(tensor.nbytes) for tensor in models.load_tensors(checkpoint).values()) * 7 // 2


@pytest.fixture(scope="session")
async def kept(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """The daemon of most tests."""
    staging = str(num_staging_bytes(checkpoints["a"]))
    # As many sequences at a time as the oracle warms it up with: vLLM's workers keep what larger batches take.
    batch = str(NUM_WARMING_STREAMS)
    flags = ("--max-staging-bytes", staging, "--write-timeout", "5", "--max-num-seqs", batch)
    flags += ("--max-active-requests", str(MAX_ACTIVE))
    async with Kept(checkpoints, tmp_path_factory.mktemp("subject"), *flags) as daemons:
        yield daemons


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push of this process gives a daemon up that is gone for a second."""
    monkeypatch.setattr(upload, "RESUME_TIMEOUT_S", 1.0)


@pytest.fixture
async def subject(kept: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon on checkpoint a that runs and has nothing staged."""
    async with kept.for_one_test(request.session) as daemon:
        yield daemon
