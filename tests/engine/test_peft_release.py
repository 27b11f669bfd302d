"""PEFT's released package: its adapters are served by name, its merged models as weights, and what vLLM does not have
is refused with what it is."""

import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, ManifestMismatchError
from tests.engine.outputs import next_version
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.refusals import refuses
from tests.support.released_package import NO_WARNINGS, ReleasedPackage
from tests.support.same_policy import assert_same_policy

pytestmark = [
    pytest.mark.long(  # the package is installed and imported for it
        *("genserve/client/weights", "genserve/weights/lora", "genserve/engine/vllm/loras.py", "tests/peft"),
        *(f"tests/support/{name}.py" for name in ("released_package", "same_policy")),
    ),
    NO_WARNINGS,
]
TARGETS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
"""An adapter that changes what the model computes as it is made."""
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "all layers": {"target_modules": "all-linear"},
    "rank-stabilized": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 16}},
}
MERGED_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora: DoRA"),
    "biases": ({"bias": "all"}, "bias: biases of the model's layers"),
    "biases of its layers": ({"bias": "lora_only"}, "bias: biases of the model's layers"),
    "a bias of its own": ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias: a bias of the adapter's own"),
    "single rows": ({"trainable_token_indices": [5, 42]}, "trainable_token_indices: single rows of embeddings"),
    "whole layers": ({"modules_to_save": ["lm_head", "norm"]}, "modules_to_save: whole layers"),
}
"""What vLLM's adapters do not have, and how the refusal begins."""


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon that takes adapters, in float32, and its model as a trainer loads it."""

    client: AsyncClient
    model: Any


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """On a model with biases, and with a head of its own."""
    directory = tmp_path_factory.mktemp("peft")
    checkpoint = models.tiny_qwen2(directory / "checkpoint", tie=False)
    flags = ["--model", str(checkpoint), "--dtype", "float32", "--enable-lora", *SMALL_ENGINE]
    process = DaemonProcess(flags, directory / "stderr")
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        process.wait_serving()
        async with AsyncClient(process.address) as client:
            yield Served(client, model)
    finally:
        process.end()


@pytest.fixture
def peft() -> Any:
    """The package."""
    return ReleasedPackage("peft").imported()


def adapted(peft: Any, model: Any, **options: Any) -> Any:
    """The model with an adapter; what else PEFT trains differs from the model's, too."""
    tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{**TARGETS, **options})).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and ".lora_" not in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return tuned


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
async def test_an_adapter_computes_what_it_does_in_the_trainer(
    served: Served, peft: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """From memory, as the guide has it, and from the directory that PEFT saves."""
    await served.client.push_weights(served.model, version=await next_version(served.client))
    model = adapted(peft, served.model, **options)
    tensors, config = peft.get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    model.save_pretrained(tmp_path)
    for pushed in ((tensors, config), (tmp_path,)):
        await served.client.push_lora("policy", *pushed)
        await assert_same_policy(served.client, model, "policy")
        await served.client.unload_lora("policy")


@pytest.mark.parametrize("unload", [False, True])
@pytest.mark.parametrize("options", [*SERVED.values(), *(each for each, _ in MERGED_ONLY.values())])
async def test_a_merged_model_computes_what_it_does_with_its_adapter(
    served: Served, peft: Any, options: dict[str, Any], unload: bool
) -> None:
    """Merged in place, where layers keep PEFT's names, or unloaded: whatever the adapter is."""
    model = adapted(peft, served.model, **options)
    same = copy.deepcopy(model)
    if unload:
        model = model.merge_and_unload()
    else:
        model.merge_adapter()
    await served.client.push_weights(model, version=await next_version(served.client))
    await assert_same_policy(served.client, same)


@pytest.mark.parametrize(("options", "says"), MERGED_ONLY.values(), ids=MERGED_ONLY)
async def test_what_only_a_merged_model_can_have_is_refused_as_an_adapter(
    served: Served, peft: Any, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """By its configuration; and where that is another one, by the tensors."""
    model = adapted(peft, served.model, **options)
    tensors, config = peft.get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    model.save_pretrained(tmp_path)
    for pushed in ((tensors, config), (tmp_path,)):
        with refuses(InvalidFieldError, field="header.lora.config", says=says):
            await served.client.push_lora("policy", *pushed)
    with refuses(ManifestMismatchError, says=says.partition(":")[0]):
        await served.client.push_lora("policy", tensors, config | dict.fromkeys(options) | {**TARGETS, "bias": "none"})


async def test_an_adapter_that_is_not_merged_is_no_weights(served: Served, peft: Any) -> None:
    """The error says both ways to serve it, and push_lora which tensors it takes."""
    model = adapted(peft, served.model)
    with pytest.raises(ValueError, match=r"push it with push_lora, or merge it first, with PEFT's merge_adapter\(\)"):
        await served.client.push_weights(model, version=await next_version(served.client))
    with pytest.raises(TypeError, match="get_peft_model_state_dict"):
        await served.client.push_lora("policy", model, model.peft_config["default"].to_dict())
