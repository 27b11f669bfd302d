"""An adapter for the scripted engine."""

import torch

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": {"q"}}
TENSORS = {
    "base_model.model.q.lora_A.weight": torch.ones(2, 4),
    "base_model.model.q.lora_B.weight": torch.ones(6, 2),
}
