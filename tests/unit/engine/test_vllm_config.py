"""What genserve sets of vLLM's arguments."""

import os
from pathlib import Path

import pytest

from genserve.engine import vllm_config
from genserve.engine.vllm_config import AsyncEngineArgs


def test_a_draft_model_keeps_its_weights_through_level_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No push brings them. What the user wants kept is kept as well."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is told to workers is no matter of later tests
    model = str(tmp_path)
    args = AsyncEngineArgs(model=model, enable_sleep_mode=True, sleep_preserve_parameter_names=["*.bias"])
    assert vllm_config.adapted(args, "auto").sleep_preserve_parameter_names == ["*.bias", "draft.*"]
    assert vllm_config.adapted(args, "auto").sleep_preserve_parameter_names == ["*.bias", "draft.*"]
    assert vllm_config.adapted(AsyncEngineArgs(model=model), "auto").sleep_preserve_parameter_names == []
