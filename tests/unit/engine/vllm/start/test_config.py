"""What genserve sets of vLLM's arguments."""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM

from genserve.doctor.serve_flags import DEFAULT_UTILIZATION
from genserve.engine.vllm import engine as vllm
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.engine.vllm.start.failure import EngineStartError
from genserve.settings.config import WEIGHT_UPDATES
from genserve.worker.contract.vllm_settings import RANKS_HERE_KEY, WEIGHT_UPDATE_KEY
from tests.support import models


def test_a_draft_model_keeps_its_weights_through_level_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No push brings them. What the user wants kept is kept as well."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is told to workers is no matter of later tests
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    model = str(tmp_path)
    args = AsyncEngineArgs(model=model, enable_sleep_mode=True, sleep_preserve_parameter_names=["*.bias"])
    assert vllm_config.adapted(args, "auto").sleep_preserve_parameter_names == ["*.bias", "draft.*"]
    assert vllm_config.adapted(args, "auto").sleep_preserve_parameter_names == ["*.bias", "draft.*"]
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1", "a first request would wait for a compiler"
    assert vllm_config.adapted(AsyncEngineArgs(model=model), "auto").sleep_preserve_parameter_names == []


def test_a_way_that_the_platform_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process is started. The others are taken."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for device_type, refused in (("cpu", ["host"]), ("cuda", [])):
        is_cpu = device_type == "cpu"
        platform = SimpleNamespace(
            device_type=device_type, is_cpu=lambda is_cpu=is_cpu: is_cpu, is_cuda_alike=lambda is_cpu=is_cpu: not is_cpu
        )
        monkeypatch.setattr(vllm_config, "current_platform", platform)
        for asked in WEIGHT_UPDATES:
            flags = vllm_config.parser("serve", "").parse_args([])
            if asked in refused:
                with pytest.raises(ValueError, match=f"--weight-update {asked} needs a GPU"):
                    vllm_config.check_flags(flags, asked, with_openai=False)
            else:
                vllm_config.check_flags(flags, asked, with_openai=False)
                args = vllm_config.adapted(AsyncEngineArgs(model=str(tmp_path)), asked)
                assert args.additional_config["genserve_weight_update"] == asked


def test_the_doctor_knows_vllms_default_of_the_share_of_a_device() -> None:
    """What fits is computed from it."""
    assert AsyncEngineArgs.gpu_memory_utilization == DEFAULT_UTILIZATION


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        ({}, 1),
        ({"data_parallel_size": 8}, 8),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"tensor_parallel_size": 4, "nnodes": 2}, 2),
    ],
)
def test_replica_of_a_dense_model_knows_how_many_ranks_share_its_host(
    tmp_path: Path, flags: dict[str, int], num_ranks: int
) -> None:
    """vLLM makes it an engine of its own, whose configuration does not say that there are others. The arguments say it
    too, for a configuration that is made of them later."""
    args = AsyncEngineArgs(model=str(models.tiny_qwen3(tmp_path)), additional_config={"x": 1}, **flags)
    config = vllm_config.with_ranks_here(args, copy.copy(args).create_engine_config())
    replica = copy.deepcopy(config)
    replica.parallel_config.reconfigure_for_independent_dp_rank()  # as run_engine_core does
    assert replica.additional_config[RANKS_HERE_KEY] == num_ranks
    assert args.additional_config == config.additional_config
    assert config.additional_config["x"] == 1


async def test_the_engine_is_started_with_that_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes get the configuration, and not the arguments."""
    started: list[VllmConfig] = []

    def from_vllm_config(config: VllmConfig, **_: object) -> None:
        started.append(config)
        raise EngineStartError("enough")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", from_vllm_config)
    args = AsyncEngineArgs(model=str(models.tiny_qwen3(tmp_path)), data_parallel_size=3)
    with pytest.raises(EngineStartError, match="enough"):
        await vllm.VllmEngine.start(args, vllm.EngineOptions(IntakeLimits(8, 8), "inplace"))
    assert started[0].additional_config[RANKS_HERE_KEY] == 3
    assert started[0].additional_config[WEIGHT_UPDATE_KEY] == "inplace"
