"""An adapter for the scripted engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": {"q"}}
TENSORS = {
    "base_model.model.q.lora_A.weight": torch.ones(2, 4),
    "base_model.model.q.lora_B.weight": torch.ones(6, 2),
}


def adapter(directory: Path) -> str:
    """An adapter in a directory."""
    save_file(TENSORS, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    return str(directory)
