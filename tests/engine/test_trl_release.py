"""TRL's released package: its own trainer, unmodified, trains against a daemon, through a client with TRL's methods."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.released_package import ROOT, ReleasedPackage

TRL = ReleasedPackage("trl")
NUM_STEPS = 6
# The package is installed and imported for it.
pytestmark = pytest.mark.long(
    *("genserve/integrations/trl.py", "clients/python/examples/trl_grpo.py"),
    *("tests/trl", "tests/support/released_package.py"),
)

OBSERVED = """
import json
import runpy
import sys

from trl import GRPOTrainer


def train(trainer, whole=GRPOTrainer.train):
    whole(trainer)
    print("TRAINED", json.dumps(trainer.state.log_history))


GRPOTrainer.train = train
del sys.argv[0]  # then the example's own path is the first one
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the example, and prints what TRL has logged."""


@pytest.fixture
def scored_daemon(learner: Path, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with the flags that the guide names, in float32 as its trainer."""
    flags = ["--model", str(learner), *SMALL_ENGINE, "--max-model-len", "512", "--dtype", "float32"]
    flags += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


async def test_the_client_has_every_method_and_parameter_of_the_released_one() -> None:
    """In their order, with their defaults; what ours has beside them is keyword-only."""
    done = await asyncio.to_thread(TRL.run, TRL.program("signatures.py"), 120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["compared with TRL 1.16.0"]


async def test_the_daemons_log_probabilities_are_those_of_the_released_trainer(
    scored_daemon: DaemonProcess, learner: Path, tmp_path: Path
) -> None:
    """In each step of the example: its rollouts are of that step's weights."""
    example = str(ROOT / "clients" / "python" / "examples" / "trl_grpo.py")
    flags = ["--model", str(learner), "--target", scored_daemon.address, "--steps", str(NUM_STEPS)]
    done = await asyncio.to_thread(TRL.run, OBSERVED, 240, [example, *flags], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "biases the importance" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TRAINED ")]
    steps = [entry for entry in json.loads(line.removeprefix("TRAINED ")) if "loss" in entry]
    assert len(steps) == NUM_STEPS
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 0.001
    assert all(step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.001) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
