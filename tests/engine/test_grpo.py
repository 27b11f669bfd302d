"""The GRPO example against real vLLM: the reward rises, because of the pushes, and the ratios are as they should be."""

import copy
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient
from tests.support.daemon_process import DaemonProcess
from tests.support.trainer_programs import DIRECTORY, fidelity, tiny_model, train
from tests.support.warm import process

PROMPTS = {letter: letter for letter in tiny_model.LETTERS}
STEPS = 40
pytestmark = pytest.mark.long(
    "clients/python/grpo",
    "genserve/client/weights/modules.py",
    "genserve/engine/vllm/requests/weight_spans.py",
    "genserve/engine/vllm/requests/logprobs.py",
    "tests/support/trainer_programs.py",
)
FLOAT32 = fidelity.TOLERANCES["float32"]


async def trained(client: AsyncClient, learner: Path, **recipe: Any) -> list[Any]:
    """The steps of a training from the beginning, with one seed."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    steps: list[Any] = []
    await train.train(client, model, PROMPTS, train.Recipe(**{"steps": STEPS, "seed": 0} | recipe), steps.append)
    return steps


def has_learnt(steps: Sequence[Any]) -> bool:
    """Whether the reward is far above where it began, which is chance: about one word of 26."""
    first, last = mean(step.reward for step in steps[:5]), mean(step.reward for step in steps[-5:])
    return last > 0.5 and last > 4 * first


async def test_the_reward_rises(learner_client: AsyncClient, learner: Path) -> None:
    """In turns, every token is of the version that is trained, and the daemon's log-probabilities are the trainer's."""
    steps = await trained(learner_client, learner, mode="sync")
    assert has_learnt(steps), [round(step.reward, 2) for step in steps]
    assert [step.max_staleness for step in steps] == [0] * STEPS
    assert max(step.drift for step in steps) < FLOAT32.mean


async def test_the_reward_does_not_rise_without_the_pushes(
    learner_client: AsyncClient, learner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: pushes come and are counted, but bring the weights of the beginning."""
    push, untrained = train.push, AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    monkeypatch.setattr(train, "push", lambda client, model, version: push(client, untrained, version))
    steps = await trained(learner_client, learner, mode="sync")
    assert not has_learnt(steps), [round(step.reward, 2) for step in steps]
    assert max(step.drift for step in steps) > 100 * FLOAT32.mean, "nor do the ratios tell that something is wrong"


async def test_one_step_ahead_the_ratios_are_over_the_version_that_sampled(
    learner_client: AsyncClient, learner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts overlap the training and the push: their tokens are of the version before, and of the trained one.

    For each token the daemon's figure is that of the version it is labelled with, computed by the trainer's own model
    of that time; the version that is trained gives other figures, which is the control.
    """
    history: list[Any] = []
    batches: list[Any] = []
    update = train.update

    def recorded(model: Any, optimiser: Any, samples: Any, *others: Any) -> Any:
        history.append(copy.deepcopy(model))
        batches.append(samples)
        return update(model, optimiser, samples, *others)

    monkeypatch.setattr(train, "update", recorded)
    first = (await learner_client.get_weights()).weight_version + 1
    steps = await trained(learner_client, learner, mode="async", max_tokens=24, steps=60)
    assert has_learnt(steps), [round(step.reward, 2) for step in steps]
    assert [step.max_staleness for step in steps] == [0] + [1] * (len(steps) - 1)
    assert max(step.kept for step in steps) > 0, "no push met a rollout"
    assert max(step.mixed for step in steps) > 0, "no answer has tokens of two versions"

    own, trained_one = [], []
    for number, samples in enumerate(batches):
        for version in samples.versions[samples.mask].unique().tolist():
            tokens = samples.versions == version
            for found, model in ((own, history[version - first]), (trained_one, history[number])):
                with torch.no_grad():
                    differences = train.logprobs_of(model, samples.tokens) - samples.logprobs
                if version < first + number:
                    found.append(differences[tokens].abs())
                elif found is own:
                    assert differences[tokens].abs().max() < FLOAT32.max
    assert torch.cat(own).max() < FLOAT32.max
    assert torch.cat(trained_one).mean() > 100 * torch.cat(own).mean()


def test_the_program_writes_a_line_a_step(learner_daemon: DaemonProcess, learner: Path, tmp_path: Path) -> None:
    """As a user runs it, beside a daemon that runs already."""
    command = [sys.executable, str(DIRECTORY / "train.py"), "--address", learner_daemon.address]
    command += ["--model", str(learner), "--mode", "async", "--steps", "2", "--out", str(tmp_path)]
    done = process.run(command, timeout=120)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "async.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == ["1", "2"]
    assert all(0 <= float(line["reward"]) <= 1 and float(line["paused_ms"]) > 0 for line in lines)
    assert "2/2" in done.stderr  # the progress bar
    assert (tmp_path / "async.png").is_file() or "matplotlib is not installed" in done.stderr
