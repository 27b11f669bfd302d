"""The table of settings that are refused, on vLLM's own configurations. test_refused_flags.py has what flags
show by themselves."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.config.quantization import _ONLINE_SHORTHANDS
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler

from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import refusals, unreached
from genserve.engine.vllm.start.failure import EngineStartError
from genserve.engine.vllm.start.refusals import TABLE, check, rows
from tests.support import models
from tests.unit.engine.vllm.start.load_formats import LOAD_FORMATS_OF_OWN_MEMORY

Make = Callable[..., VllmConfig]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """What vLLM makes of no flags but a model."""
    return AsyncEngineArgs(model=str(models.tiny_qwen3(tmp_path_factory.mktemp("model")))).create_engine_config()


@pytest.fixture(scope="module")
def make(plain: VllmConfig) -> Make:
    """What vLLM makes of flags, given as `AsyncEngineArgs` has them."""
    return lambda **flags: AsyncEngineArgs(model=plain.model_config.model, **flags).create_engine_config()


def changed(plain: VllmConfig, changes: dict[str, Any]) -> VllmConfig:
    """The configuration with fields set, by their path: for what vLLM refuses where there is no GPU, or Ray."""
    config = copy.copy(plain)
    for path, value in changes.items():
        *parents, key = path.split(".")
        owner: Any = config
        for parent in parents:
            part = copy.copy(getattr(owner, parent))
            object.__setattr__(owner, parent, part)
            owner = part
        object.__setattr__(owner, key, value)
    return config


def connector(name: str, **extra: Any) -> dict[str, Any]:
    """As a user asks for one."""
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


STORE = "MooncakeStoreConnector"
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

# By row: flags that vLLM takes here, which the row is about, and similar ones which it is not about.
FLAGS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "online-quantization-over-ranks": (
        [
            {"quantization": "fp8_per_tensor", "tensor_parallel_size": 2},
            {"quantization": "fp8_per_channel", "tensor_parallel_size": 2},
            {"quantization": "nvfp4_per_token", "tensor_parallel_size": 2},
            {"quantization": "int8_per_channel_weight_only", "tensor_parallel_size": 2},
            {
                "quantization": "online",
                "quantization_config": {"targets": {"re:.*o_proj": "fp8_per_tensor"}},
                "tensor_parallel_size": 2,
            },
        ],
        [
            {"quantization": "fp8_per_tensor"},
            {"quantization": "fp8_per_tensor", "data_parallel_size": 2},  # a dense model: whole replicas
            {"quantization": "fp8_per_block", "tensor_parallel_size": 2},
            {"quantization": "mxfp8", "tensor_parallel_size": 2},
            {"quantization": "mxfp4", "tensor_parallel_size": 2},
            {"tensor_parallel_size": 2},
        ],
    ),
    "weights-offloaded-to-host": ([{"cpu_offload_gb": 1}, {"offload_backend": "uva"}], [{}]),
    "weights-prefetched-from-host": ([{"offload_group_size": 2}], [{"cpu_offload_gb": 1}]),
    "weights-shared-with-preload": (
        [
            {"load_format": "ipc_cache"},
            {"load_format": "IPC_CACHE", "model_loader_extra_config": {"mode": "zero_copy", "fallback": False}},
        ],
        [
            {"load_format": "ipc_cache", "model_loader_extra_config": {"mode": "copy"}},
            *({"load_format": name} for name in LOAD_FORMATS_OF_OWN_MEMORY),
        ],
    ),
    "weights-published-to-peers": ([{"load_format": "modelexpress"}], [{"load_format": "auto"}]),
    "adapters-on-other-hosts": (
        [
            {"enable_lora": True, "data_parallel_size": 2, "data_parallel_size_local": 1},
            {"enable_lora": True, "nnodes": 2, "tensor_parallel_size": 2},
        ],
        [
            {"enable_lora": True, "data_parallel_size": 2},
            {"enable_lora": True, "tensor_parallel_size": 2},
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            {"nnodes": 2, "tensor_parallel_size": 2},
        ],
    ),
    "kv-connector-without-reset": (
        [
            {"kv_transfer_config": connector("ExampleConnector", shared_storage_path="/tmp")},
            {
                "kv_transfer_config": connector(
                    "MultiConnector", connectors=[connector(STORE), connector("ExampleConnector")]
                )
            },
        ],
        [
            {"kv_transfer_config": connector("OffloadingConnector", cpu_bytes_to_use=1 << 20)},
            {"kv_transfer_config": connector("MultiConnector", connectors=[connector(STORE)])},
            {"kv_offloading_size": 1.0},
        ],
    ),
    "kv-connector-of-requests": (
        [
            {"kv_transfer_config": connector("NixlConnector")},
            {
                "kv_transfer_config": connector(
                    "MultiConnector", connectors=[connector(STORE), connector("NixlConnector")]
                )
            },
        ],
        [
            {"kv_transfer_config": connector("OffloadingConnector", cpu_bytes_to_use=1 << 20)},
            {"kv_transfer_config": connector("MultiConnector", connectors=[connector(STORE)])},
            {},
        ],
    ),
    "arguments-of-logits-processors": ([{"logits_processors": ["package.module:Processor"]}], [{}]),
    "draft-model": ([], [{"speculative_config": NGRAM}]),
    "pipeline-on-cpu": ([{"pipeline_parallel_size": 2}], [{"tensor_parallel_size": 2}]),
    "spread-experts-on-cpu": ([], [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}]),
}

EXPERTS = {"model_config.get_num_experts": lambda: 4}

# By row: fields of a configuration, as vLLM sets them where it can.
FIELDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "expert-load-balancing": (
        [{"parallel_config.enable_eplb": True}],
        [{"parallel_config.enable_expert_parallel": True}],
    ),
    "elastic-experts": ([{"parallel_config.enable_elastic_ep": True}], [{"parallel_config.data_parallel_size": 1}]),
    "online-quantization-over-ranks": (
        [{"model_config.quantization": "experts_int8", "parallel_config.tensor_parallel_size": 2}],
        [{"model_config.quantization": "experts_int8"}],
    ),
    "decode-context-parallelism": (
        [{"parallel_config.decode_context_parallel_size": 2}],
        [{"parallel_config.prefill_context_parallel_size": 2}],
    ),
    "attention-fused-with-quantization": (
        [{"compilation_config.pass_config.fuse_attn_quant": True}],
        [
            {"compilation_config.pass_config.fuse_attn_quant": False},
            {"compilation_config.pass_config.fuse_norm_quant": True},
        ],
    ),
    "weights-prefetched-from-host": ([{"offload_config.offload_backend": "prefetch"}], []),
    "ray-workers": (
        [{"parallel_config.distributed_executor_backend": "ray"}],
        [{"parallel_config.distributed_executor_backend": "mp"}],
    ),
    "ray-engines": (
        [{"parallel_config.data_parallel_backend": "ray"}],
        [{"parallel_config.data_parallel_backend": "mp"}],
    ),
    "pooling": ([{"model_config.runner_type": "pooling"}], [{"model_config.runner_type": "generate"}]),
    "encoder-connector": ([{"ec_transfer_config": object()}], [{"ec_transfer_config": None}]),
    "pipeline-on-cpu": (
        [],
        [{"parallel_config.pipeline_parallel_size": 2, "device_config.device_type": "cuda"}],
    ),
    "spread-experts-on-cpu": (
        [
            {**EXPERTS, "parallel_config.data_parallel_size": 2},
            {**EXPERTS, "parallel_config.enable_expert_parallel": True, "parallel_config.tensor_parallel_size": 2},
        ],
        [
            {**EXPERTS, "parallel_config.enable_expert_parallel": True},
            {**EXPERTS, "parallel_config.tensor_parallel_size": 2},
            {**EXPERTS, "parallel_config.data_parallel_size": 2, "device_config.device_type": "cuda"},
        ],
    ),
}


class Speculative:
    """As vLLM's SpeculativeConfig, which looks for the draft model's files."""

    def __init__(self, method: str, model: str = "") -> None:
        self.method = method
        self.draft_model_config = SimpleNamespace(model=model)


FIELDS["draft-model"] = (
    [{"speculative_config": Speculative(method)} for method in ("mtp", "eagle3", "draft_model", "custom_class")],
    [
        *({"speculative_config": Speculative(method)} for method in ("ngram_gpu", "suffix")),
        {"speculative_config": Speculative("mtp", "served"), "model_config.model": "served"},
    ],
)


def applying(config: VllmConfig) -> set[str]:
    """Names of the rows that apply."""
    return {row.name for row in rows(config)}


def test_the_table_is_whole() -> None:
    """Every row has a name of its own, something to be asked for by, and a test of what it is about and what not."""
    assert len({row.name for row in TABLE}) == len(TABLE)
    configured = [row for row in TABLE if row.reads != "flags"]
    for row in configured:
        assert all(flag.startswith("--") for flag in row.flags)
        cases = [table[row.name] for table in (FLAGS, FIELDS) if row.name in table]
        assert any(applies for applies, _ in cases), row.name
        assert any(others for _, others in cases), row.name
    assert FLAGS.keys() | FIELDS.keys() == {row.name for row in configured}


def test_the_flags_are_vllms() -> None:
    """A user finds them in the help."""
    known = vllm_config.parser("genserve serve", "")._option_string_actions
    for row in TABLE:
        for flag in row.flags:
            assert {word for word in flag.split() if word.startswith("--")} <= known.keys(), row.name


def test_no_flags_are_no_reason_to_refuse(plain: VllmConfig) -> None:
    """Nor to warn."""
    assert check(plain, with_openai=False) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_a_row_applies_to_what_vllm_makes_of_its_flags_alone(make: Make, name: str) -> None:
    """Not to flags that look alike."""
    applies, others = FLAGS[name]
    for flags in applies:
        assert name in applying(make(**flags)), flags
    for flags in others:
        assert name not in applying(make(**flags)), flags


@pytest.mark.parametrize("name", FIELDS)
def test_a_row_applies_to_fields_that_vllm_sets_elsewhere(
    plain: VllmConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, or Ray."""
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    applies, others = FIELDS[name]
    for fields in applies:
        assert name in applying(changed(plain, fields)), fields
    for fields in others:
        assert name not in applying(changed(plain, fields)), fields


@pytest.mark.slow
def test_experts_are_sharded_over_data_parallel_engines(plain: VllmConfig, tmp_path: Path) -> None:
    """So their scales are agreed on over those."""
    experts = AsyncEngineArgs(model=str(models.tiny_qwen3_moe(tmp_path)), quantization="fp8_per_tensor")
    config = experts.create_engine_config()
    assert applying(config) == set()
    spread = {"parallel_config.data_parallel_size": 2, "parallel_config.data_parallel_size_local": 2}
    over_ranks = changed(config, {**spread, "device_config.device_type": "cuda"})
    assert applying(over_ranks) == {"online-quantization-over-ranks"}


def test_a_refusal_names_the_flag_the_reason_and_what_to_do(plain: VllmConfig) -> None:
    """All of them, when there is more than one; warnings wait for another start."""
    refused = {"parallel_config.enable_eplb": True, "parallel_config.enable_elastic_ep": True}
    with pytest.raises(EngineStartError) as error:
        check(changed(plain, {**refused, "ec_transfer_config": object()}), with_openai=False)
    text = str(error.value)
    for row in TABLE:
        named = row.name in ("expert-load-balancing", "elastic-experts")
        assert (row.message in text) == named
        if named:
            assert row.flags[0] in text and row.reason in text and row.instead in text
    assert "\n" not in text


def test_a_warning_lets_the_engine_start(plain: VllmConfig) -> None:
    """And is told."""
    (warning,) = check(changed(plain, {"speculative_config": Speculative("eagle3")}), with_openai=True)
    assert warning.startswith("--speculative-config ")
    assert "draft-model" in warning


def test_a_connector_for_fields_of_requests_is_refused_without_http(make: Make) -> None:
    """Requests over gRPC have none of the fields that such a connector waits for."""
    config = make(kv_transfer_config=connector("NixlConnector"))
    with pytest.raises(
        EngineStartError, match=r"would reach nothing without --openai-port.*\[kv-connector-of-requests\]"
    ):
        check(config, with_openai=False)
    assert all("kv-connector-without-reset" in warning for warning in check(config, with_openai=True))


def test_logits_processors_without_arguments_are_a_warning_without_http(make: Make) -> None:
    """One that acts on every request needs none."""
    config = make(logits_processors=["package.module:Processor"])
    (warning,) = check(config, with_openai=False)
    assert warning.startswith("--logits-processors get no arguments without --openai-port, because ")
    assert check(config, with_openai=True) == ()


def test_connectors_that_are_said_to_drop_what_they_hold_do() -> None:
    """Any other one says nothing when vLLM asks, and vLLM takes that for a yes."""
    registered = KVConnectorFactory._registry
    directory = Path(inspect.getfile(KVConnectorBase_V1)).parent
    resetting = {path for path in directory.rglob("*.py") if "    def reset_cache(" in path.read_text()}
    assert registered.keys() >= refusals.RESETTING_CONNECTORS | unreached.CONNECTORS_OF_REQUESTS
    for name in refusals.RESETTING_CONNECTORS:
        assert any(f"class {name}(" in path.read_text() for path in resetting), name
    assert "return None" in inspect.getsource(KVConnectorBase_V1.reset_cache)
    assert "self.connector.reset_cache() is False" in inspect.getsource(Scheduler.reset_connector_cache)


def test_what_every_online_quantization_needs_of_other_ranks_is_known(make: Make) -> None:
    """A new one of vLLM's is looked at before it is served over ranks: does it reduce over them while it loads?"""
    assert set(_ONLINE_SHORTHANDS) == {
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "mxfp8",
        "mxfp4",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
    }
