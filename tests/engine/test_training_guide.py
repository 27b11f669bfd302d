"""The examples of docs/training.md, run as they stand against a real daemon; only the address is another."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support.daemon_process import DaemonProcess
from tests.support.trainer_programs import fidelity

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


async def run(daemon: DaemonProcess, containing: str, names: dict[str, Any]) -> None:
    """Runs the example that contains a word, among `names`, which gain its own."""
    program = block("python", containing, GUIDE).replace(WRITTEN_ADDRESS, daemon.address)
    await asyncio.to_thread(exec, program, names)


@pytest.fixture
async def names(learner: Path, learner_client: AsyncClient) -> dict[str, Any]:
    """What the examples take for granted: a model, which the daemon serves, its optimiser, prompts and a reward."""
    model = AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    await learner_client.push_weights(model, version=(await learner_client.get_weights()).weight_version + 1)
    return {
        "model": model,
        "optimiser": torch.optim.Adam(model.parameters(), lr=1e-3),
        "prompts": ["a", "b", "c"],
        "advantages_of": lambda groups: [len(set(s.token_ids)) - 10 for group in groups for s in group.sequences],
    }


async def test_the_ten_lines_train_what_is_served(
    learner_daemon: DaemonProcess, learner_client: AsyncClient, names: dict[str, Any]
) -> None:
    """A push before two steps, one after each; the daemon has the trainer's weights, which are others than before."""
    before = await learner_client.pull_weights()
    untrained = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    await run(learner_daemon, "def policy_loss", names)
    await run(learner_daemon, "advantages_of(groups)", names)
    after = await learner_client.pull_weights()
    assert after.weight_version == before.weight_version + 3
    spans = [span for group in names["groups"] for sequence in group.sequences for span in sequence.weight_spans]
    assert {span.version for span in spans} == {after.weight_version - 1}
    served, trained = after.state_dict(), names["model"].state_dict()
    assert served.keys() == trained.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in trained.items())
    assert not any(torch.equal(untrained[name], tensor) for name, tensor in trained.items())


async def test_a_dict_with_other_names_is_pushed_by_renaming_them(
    learner_daemon: DaemonProcess, learner_client: AsyncClient, names: dict[str, Any]
) -> None:
    """The daemon serves the trainer's weights."""
    with torch.no_grad():
        for parameter in names["model"].parameters():
            parameter.mul_(1.5)
    await run(learner_daemon, "rename=", names)
    served = (await learner_client.pull_weights()).state_dict()
    assert all(torch.equal(tensor, names["model"].state_dict()[name]) for name, tensor in served.items())


async def test_the_loss_is_over_the_sampled_log_probabilities(
    learner_daemon: DaemonProcess, learner_client: AsyncClient, names: dict[str, Any]
) -> None:
    """Under the weights that sampled all ratios are 1; tokens of versions that are too old do not count."""
    await run(learner_daemon, "def policy_loss", names)
    groups = await learner_client.generate_many(["a", "b"], n=2, max_tokens=8, logprobs=0, prompt_token_ids=True)
    lengths = torch.tensor([float(len(s.token_ids)) for group in groups for s in group.sequences])
    advantages = torch.tensor([1.0, -2.0, 3.0, 0.5])
    loss = names["policy_loss"](names["model"], groups, advantages)
    assert loss.item() == pytest.approx(-((advantages * lengths).sum() / lengths.sum()).item(), abs=1e-4)
    # The second group is as if sampled by older weights, which thought little of these tokens.
    served = groups[0].sequences[0].weight_spans[0].version
    for sequence in groups[1].sequences:
        sequence.weight_spans = [span._replace(version=served - 1) for span in sequence.weight_spans]
        sequence.logprobs.sampled = [each - 1 for each in sequence.logprobs.sampled]
    stale = names["policy_loss"](names["model"], groups, advantages)
    ratio = torch.tensor([1, 1, 1.2, 1.2])  # clipped from e
    assert stale.item() == pytest.approx(-((ratio * advantages * lengths).sum() / lengths.sum()).item(), abs=1e-4)
    fresh = names["policy_loss"](names["model"], groups, advantages, oldest_version=served)
    assert fresh.item() == pytest.approx(-((advantages * lengths)[:2].sum() / lengths[:2].sum()).item(), abs=1e-4)


async def test_an_answer_that_a_push_has_ended_goes_on_under_the_new_weights(
    learner_daemon: DaemonProcess, names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the push met: the rollout had begun in most runs, and may have ended in some."""
    await run(learner_daemon, 'pause_mode="abort"', names)
    answer = names["answer"]
    assert answer.finish_reason in ("paused", "length")
    if answer.finish_reason == "paused":
        rest = names["rest"].sequences[0]
        assert len(answer.token_ids) + len(rest.token_ids) == 400
        assert [span.version for span in rest.weight_spans] == [names["version"]]
        assert "WeightSpan" in capsys.readouterr().out


def test_the_guide_has_the_tolerances() -> None:
    """As the program has them."""
    for dtype, tolerance in fidelity.TOLERANCES.items():
        assert f"| {dtype} | {tolerance.max:g} | {tolerance.mean:g} |" in GUIDE.read_text()
