"""Small LoRA adapters, and what a model with one should say."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from genserve.client import AsyncClient
from tests.support import models

Tensors = dict[str, torch.Tensor]
PROMPT = [5, 6, 7, 8, 9, 10]
VOCABULARY = 512
CONFIG: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
}


def adapter(checkpoint: Path, seed: int, rank: int = 4) -> Tensors:
    """One for the modules of CONFIG, under PEFT's names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in models.load_tensors(checkpoint).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in CONFIG["target_modules"]:
            rows, columns = weight.shape
            a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a / columns**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = b / rank**0.5 / 2
    return tensors


def merged(checkpoint: Path, tensors: Tensors) -> Tensors:
    """The checkpoint with an adapter of CONFIG in it."""
    weights = {name: tensor.float() for name, tensor in models.load_tensors(checkpoint).items()}
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += 8 / 4 * tensors[name.replace("lora_A", "lora_B")] @ a
    return weights


def saved(tensors: Tensors, directory: Path, **config: Any) -> Path:
    """As PEFT saves an adapter."""
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return directory


async def scores(client: AsyncClient, lora_name: str = "") -> list[float]:
    """Log-probabilities of every possible next token."""
    options: Any = {"max_tokens": 1, "temperature": 0.0, "logprobs": VOCABULARY - 1, "lora_name": lora_name or None}
    (sequence,) = (await client.generate(PROMPT, **options)).sequences
    assert sequence.logprobs is not None
    known = dict(sequence.logprobs.alternatives(0))
    return [known.get(token_id, 0.0) for token_id in range(VOCABULARY)]
