"""torchrl's released package: its own wrapper and updater, unmodified, on a daemon, through an engine with torchrl's
methods."""

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support.daemon_process import DaemonProcess
from tests.support.released_package import ROOT, ReleasedPackage

GUIDE = ROOT / "docs" / "trainers.md"
TORCHRL = ReleasedPackage("torchrl")
PROMPTS = [[5, 6, 7], [8, 9]]
# The package is installed and imported for it.
pytestmark = pytest.mark.long(
    "genserve/integrations", "tests/torchrl", "docs/trainers.md", "tests/support/released_package.py"
)


async def test_engine_and_balancer_have_every_method_of_the_released_ones() -> None:
    """With their parameters, in their order, with their defaults; but not what starts or addresses Ray's actors."""
    done = await asyncio.to_thread(TORCHRL.run, TORCHRL.program("signatures.py"), 240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["compared with torchrl 0.14.1"]


async def test_the_released_wrapper_generates_and_the_released_updater_updates(
    daemon: DaemonProcess, client: AsyncClient, checkpoints: dict[str, Path], restored: None
) -> None:
    """The wrapper returns the daemon's tokens and log-probabilities, before and after an update, which changes them."""
    options: Any = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    before = await client.generate_many(PROMPTS, **options)
    served = (await client.get_weights()).weight_version
    arguments = [daemon.address, str(checkpoints["b"]), json.dumps(PROMPTS)]
    done = await asyncio.to_thread(TORCHRL.run, TORCHRL.program("rollouts.py"), 240, arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROLLOUTS ")]
    rollouts = json.loads(line.removeprefix("ROLLOUTS "))
    assert (await client.get_weights()).weight_version == served + 1
    after = await client.generate_many(PROMPTS, **options)
    assert [each.token_ids for each in after] != [each.token_ids for each in before]
    for rollout, generations in zip(rollouts, (before, after), strict=True):
        assert rollout["prompt"] == PROMPTS
        assert rollout["response"] == [each.token_ids for each in generations]
        for position, generation in enumerate(generations):
            logprobs = generation.sequences[0].logprobs
            assert logprobs is not None
            assert generation.prompt is not None and generation.prompt.logprobs is not None
            expected = [0.0, *generation.prompt.logprobs.sampled, *logprobs.sampled]
            assert rollout["logprobs"][position] == pytest.approx(expected, abs=0.05)


async def test_the_example_runs_as_the_guide_has_it(
    daemon: DaemonProcess, client: AsyncClient, checkpoints: dict[str, Path], restored: None
) -> None:
    """It prints a text for each prompt, and its update is served."""
    served = (await client.get_weights()).weight_version
    example = block("python", "vLLMWrapper", GUIDE).replace(WRITTEN_ADDRESS, daemon.address)
    example = example.replace("path/to/checkpoint", str(checkpoints["b"]))
    done = await asyncio.to_thread(TORCHRL.run, example, 240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(ast.literal_eval(done.stdout.splitlines()[-1])) == 2
    assert (await client.get_weights()).weight_version == served + 1
