"""TRL's released package: its own trainer, unmodified, trains against a daemon, through a client with TRL's methods."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.released_package import ROOT, ReleasedPackage

GUIDE = ROOT / "docs" / "trainers.md"
TRL = ReleasedPackage("trl")
NUM_STEPS = 6
# The package is installed and imported for it.
pytestmark = pytest.mark.long(
    "genserve/integrations/trl.py", "tests/trl", "docs/trainers.md", "tests/support/released_package.py"
)

BEFORE = """
from datasets import Dataset

dataset = Dataset.from_dict({"prompt": [f"{letter} {letter}" for letter in "abcdefgh"]})


def reward(completions, **columns):
    return [float(completion.count("a")) for completion in completions]

"""
"""What the guide leaves to its reader."""

OBSERVED = """
import json

from transformers import TrainerCallback

from genserve.client import Client


class ServedVersions(TrainerCallback):
    def __init__(self):
        self.versions = []

    def on_step_end(self, args, state, control, **others):
        with Client(ADDRESS) as client:
            self.versions.append(client.get_weights().weight_version)


observer = ServedVersions()
trainer.add_callback(observer)
trainer.train()
print("TRAINED", json.dumps({"versions": observer.versions, "log": trainer.state.log_history}))
"""


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


async def test_the_released_trainer_trains_as_the_guide_has_it(
    scored_daemon: DaemonProcess, learner: Path, tmp_path: Path
) -> None:
    """Each step's rollouts are of that step's weights: the next version, with the trainer's log-probabilities."""
    example = block("python", "GRPOTrainer", GUIDE).replace("/tmp", str(tmp_path))
    example = example.replace(WRITTEN_ADDRESS, scored_daemon.address).replace("path/to/checkpoint", str(learner))
    train = "trainer.train()\n"
    assert example.endswith(train)
    observed = OBSERVED.replace("ADDRESS", repr(scored_daemon.address))
    program = BEFORE + example.removesuffix(train) + observed
    done = await asyncio.to_thread(TRL.run, program, 240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "biases the importance" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TRAINED ")]
    trained = json.loads(line.removeprefix("TRAINED "))
    assert trained["versions"] == list(range(1, NUM_STEPS + 1))
    steps = [entry for entry in trained["log"] if "loss" in entry]
    assert len(steps) == NUM_STEPS
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 0.001
    assert all(step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.001) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
