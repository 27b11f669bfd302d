"""Models of transformers, as a trainer has them, are pushed as they are: wrapped, with a merged adapter, with the
experts of a layer in one tensor. Each equals a push of the checkpoint that it was loaded from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from genserve.client import AsyncClient
from genserve.errors import ManifestMismatchError
from tests.engine.outputs import next_version, state_of
from tests.support import models, vision
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.refusals import refuses

KINDS: dict[str, tuple[Callable[..., Path], Any]] = {
    "tied": (models.tiny_qwen3, AutoModelForCausalLM),
    "experts": (models.tiny_qwen3_moe, AutoModelForCausalLM),
    "images": (vision.tiny_vlm, AutoModelForImageTextToText),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_live_module_is_pushed_like_its_checkpoint(kind: str, tmp_path: Path) -> None:
    """As it is, and compiled. What it would be as a dict is refused in one sentence."""
    make, auto = KINDS[kind]
    a = make(tmp_path / "a", seed=0)
    b = models.perturbed(a, tmp_path / "b", seed=1, scale=0.5)
    process = DaemonProcess(["--model", str(a), *SMALL_ENGINE], tmp_path / "stderr")
    try:
        model = auto.from_pretrained(b, dtype="auto")  # while the daemon starts
        process.wait_serving()
        async with AsyncClient(process.address) as client:

            async def pushed(weights: Any) -> object:
                await client.push_weights(weights, version=await next_version(client))
                return await state_of(client)

            expected = await pushed(b)
            for weights in (model, torch.compile(model)):
                assert await pushed(a) != expected
                assert await pushed(weights) == expected
            with refuses(ManifestMismatchError, field="header.manifest", says="with '_orig_mod.': pass rename="):
                await pushed({f"_orig_mod.{name}": tensor for name, tensor in models.load_tensors(b).items()})
    finally:
        process.end()
