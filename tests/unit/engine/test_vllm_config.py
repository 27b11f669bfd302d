"""What genserve sets of vLLM's arguments."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from genserve.config import WEIGHT_UPDATES
from genserve.doctor.serve_flags import DEFAULT_UTILIZATION
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


def test_a_way_that_the_platform_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process is started. The others are taken."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for device_type, refused in (("cpu", ["host"]), ("cuda", [])):
        is_cpu = device_type == "cpu"
        platform = SimpleNamespace(
            device_type=device_type, is_cpu=lambda is_cpu=is_cpu: is_cpu, is_cuda_alike=lambda is_cpu=is_cpu: not is_cpu
        )
        monkeypatch.setattr(vllm_config, "current_platform", platform)
        for asked in WEIGHT_UPDATES:
            args = AsyncEngineArgs(model=str(tmp_path))
            if asked in refused:
                with pytest.raises(ValueError, match=f"--weight-update {asked} is for a GPU"):
                    vllm_config.adapted(args, asked)
            else:
                assert vllm_config.adapted(args, asked).additional_config["genserve_weight_update"] == asked


def test_the_doctor_knows_vllms_default_of_the_share_of_a_device() -> None:
    """What fits is computed from it."""
    assert AsyncEngineArgs.gpu_memory_utilization == DEFAULT_UTILIZATION
