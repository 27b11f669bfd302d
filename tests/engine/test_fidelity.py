"""The daemon's log-probabilities against the trainer's own, and a check that notices a single stale tensor."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient
from tests.support.trainer_programs import fidelity, tiny_model

pytestmark = pytest.mark.long(
    "genserve/worker",
    "genserve/weights/checkpoint",
    "genserve/weights/push/contents.py",
    "genserve/tensors",
    "genserve/client/weights/modules.py",
    "genserve/engine/vllm/requests/logprobs.py",
    "clients/python/grpo",
    "tests/support/trainer_programs.py",
)

LETTERS = list(tiny_model.LETTERS[:8])
TEXTS = fidelity.PROMPTS[:8]


async def pushed(client: AsyncClient, model: Any, **options: Any) -> None:
    """Pushes under the next version."""
    await client.push_weights(model, version=(await client.get_weights()).weight_version + 1, **options)


async def test_in_float32_both_compute_the_same_after_each_push(learner_client: AsyncClient, learner: Path) -> None:
    """Within a thousandth of a nat, and mostly far below."""
    model = AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    for seed in range(3):
        fidelity.disturb(model, seed)
        await pushed(learner_client, model)
        (found,) = await fidelity.compare(learner_client, [model], LETTERS)
        assert found.is_within(fidelity.TOLERANCES["float32"]), (found.max, found.mean)
        assert found.ratio_shares()[3] > 0.99


async def test_one_stale_tensor_is_noticed_whichever_it_is(learner_client: AsyncClient, learner: Path) -> None:
    """The daemon has everything of the new version but one tensor, each in turn, which changed by a hundredth."""
    model = AutoModelForCausalLM.from_pretrained(learner, dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    fidelity.disturb(model, seed=0)
    after = model.state_dict()
    await pushed(learner_client, after)
    unnoticed, previous = [], {}
    for name in after:
        await pushed(learner_client, {**previous, name: before[name]}, partial=True)
        (found,) = await fidelity.compare(learner_client, [model], LETTERS)
        if found.is_within(fidelity.TOLERANCES["float32"]):
            unnoticed.append((name, found.max, found.mean))
        previous = {name: after[name]}
    assert unnoticed == []
    await pushed(learner_client, previous, partial=True)
    (found,) = await fidelity.compare(learner_client, [model], LETTERS)
    assert found.is_within(fidelity.TOLERANCES["float32"]), "the control: nothing is stale any more"


async def test_in_bfloat16_both_compute_the_same_but_for_rounding(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """For a trainer of either type. A version that did not arrive is noticed."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints["b"], dtype=torch.float32)
    stale = AutoModelForCausalLM.from_pretrained(checkpoints["a"], dtype=torch.float32)
    await pushed(client, model)
    models = [model, copy.deepcopy(model).to(torch.bfloat16), stale]
    exact, rounded, other = await fidelity.compare(client, models, TEXTS)
    tolerance = fidelity.TOLERANCES["bfloat16"]
    assert exact.is_within(tolerance), (exact.max, exact.mean)
    assert rounded.is_within(tolerance), (rounded.max, rounded.mean)
    assert not other.is_within(tolerance), (other.max, other.mean)
