"""An adapter on the disk."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.unit.weights.lora.adapter import CONFIG, TENSORS


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory as PEFT writes it."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIG)
    return tmp_path
