"""The settings of vLLM that cannot be used with pushed weights, on this device or through this daemon, and why.

This is a table, without vLLM: each row checks a VllmConfig, or an object with its fields, or vLLM's flags. A refused
setting would corrupt or hang the engine at a push, perhaps hours after the start, or do nothing in silence, so it is
reported at the start, before a process exists. A warning is for a setting with a cost that the user must know.

What flags show is checked before vLLM makes a configuration, because its own checks may complain first and ask for
flags that belong to a refused one.

`worker.model.audit` finds what depends on the model and not on settings, such as weights that no exchange reaches.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from genserve.engine.vllm.start.failure import EngineStartError
from genserve.engine.vllm.start.unreached import UNREACHED, Config, Flags, Row, connectors
from genserve.worker.contract.vllm_settings import drafts_with_served_checkpoint, is_block_local, online_specs


def check_flags(flags: Flags, *, with_openai: bool) -> None:
    """Raises EngineStartError naming the flags that are refused whatever the model is. `with_openai`: requests come
    over HTTP too."""
    _messages((row for row in TABLE if row.reads != "configuration" and row.applies(flags)), with_openai)


def check(config: Config, *, with_openai: bool) -> tuple[str, ...]:
    """The warnings for a configuration. Raises EngineStartError naming the flags if one is refused."""
    return _messages(rows(config), with_openai)


def rows(config: Config) -> Iterator[Row]:
    """The rows that apply to a configuration."""
    flags = SetFlags(config)
    return (row for row in TABLE if row.reads != "flags" and row.applies(flags if row.reads == "both" else config))


class SetFlags:
    """A configuration by the names of the flags that rows check: in vLLM's configuration they are in its parts, under
    the same names."""

    def __init__(self, config: Config) -> None:
        offload = config.offload_config
        self._parts = (config.parallel_config, offload, offload.uva, offload.prefetch)

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"no part of the configuration that is looked at has {name}")


def _messages(found: Iterable[Row], with_openai: bool) -> tuple[str, ...]:
    """The warnings among these rows. Raises EngineStartError if one of them refuses."""
    counted = [row for row in found if not (row.by_http and with_openai)]
    if refused := [row.message for row in counted if row.refused]:
        raise EngineStartError("; ".join(refused))
    return tuple(row.message for row in counted)


# Speculative methods without their own weights.
_WITHOUT_DRAFT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
# Connectors that drop their keys and values if vLLM asks them to; the others do not answer, and vLLM takes this for a
# yes (distributed/kv_transfer/kv_connector/v1/base.py reset_cache).
RESETTING_CONNECTORS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"})


def _quantises_over_ranks(config: Config) -> bool:
    parallel = config.parallel_config
    num_sharing = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if config.model_config.is_moe:
        num_sharing *= parallel.data_parallel_size  # experts are sharded over these too
    return num_sharing > 1 and any(not is_block_local(spec) for spec in online_specs(config))


def _uses_ray(executor: Any) -> bool:
    """As vLLM's ParallelConfig.use_ray: by its name, or a class that says so."""
    return executor == "ray" or (isinstance(executor, type) and bool(getattr(executor, "uses_ray", False)))


def _drafts_from_elsewhere(config: Config) -> bool:
    speculative = config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_DRAFT_WEIGHTS:
        return False
    return not drafts_with_served_checkpoint(config)


def _shares_weights(config: Config) -> bool:
    load = config.load_config
    # Anything but "copy" is refused: vLLM's default without a mode is "zero_copy".
    return load.load_format == "ipc_cache" and (load.model_loader_extra_config or {}).get("mode") != "copy"


def _keeps_old_keys(config: Config) -> bool:
    return any(name not in RESETTING_CONNECTORS for name in connectors(config))


def _is_on_cpu(config: Config) -> bool:
    return str(config.device_config.device_type) == "cpu"


def _spreads_experts(config: Config) -> bool:
    """Over engines, or over the ranks of one."""
    parallel = config.parallel_config
    num_sharing = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    by_expert = bool(parallel.enable_expert_parallel) and num_sharing > 1
    return bool(config.model_config.is_moe) and (parallel.data_parallel_size > 1 or by_expert)


_ON_CPU = "cannot be used on a CPU"

TABLE: tuple[Row, ...] = (
    Row(
        name="expert-load-balancing",
        flags=("--enable-eplb",),
        applies=lambda flags: flags.enable_eplb,
        reason="it moves experts between ranks while it serves, and a push loads them where they were at the start",
        instead="leave it out: --enable-expert-parallel alone works",
        reads="both",
    ),
    Row(
        name="elastic-experts",
        flags=("--enable-elastic-ep",),
        applies=lambda flags: flags.enable_elastic_ep,
        reason="ranks that join later load the checkpoint's weights instead of the pushed ones",
        instead="start all ranks that you need at once",
        reads="both",
    ),
    Row(
        name="online-quantization-over-ranks",
        flags=("--quantization", "--quantization-config"),
        applies=_quantises_over_ranks,
        reason="all ranks agree on the scales of a whole tensor or channel while weights are loaded, and a rank that "
        "gives up a push would leave the others waiting for ever",
        instead="use a method whose scales belong to blocks (fp8_per_block, mxfp8, mxfp4), a checkpoint that is "
        "already quantised, or one rank",
    ),
    Row(
        name="decode-context-parallelism",
        flags=("--decode-context-parallel-size",),
        applies=lambda flags: flags.decode_context_parallel_size > 1,
        reason="attention gathers weights from all ranks while they are loaded, and a rank that gives up a push would "
        "leave the others waiting for ever",
        instead="leave it out",
        reads="both",
    ),
    Row(
        name="attention-fused-with-quantization",
        flags=("--compilation-config",),
        applies=lambda config: bool(config.compilation_config.pass_config.fuse_attn_quant),
        reason="the first step reads the output scale of fused attention from the weights (pass_config."
        "fuse_attn_quant), and keeps it",
        instead="do not set fuse_attn_quant",
    ),
    Row(
        name="weights-offloaded-to-host",
        flags=("--cpu-offload-gb", "--offload-backend uva"),
        applies=lambda flags: flags.cpu_offload_gb > 0 or flags.offload_backend == "uva",
        reason="vLLM keeps those weights in host memory that an exchange does not reach",
        instead="use more ranks or a smaller model",
        reads="both",
    ),
    Row(
        name="weights-prefetched-from-host",
        flags=("--offload-group-size", "--offload-backend prefetch"),
        applies=lambda flags: flags.offload_group_size > 0 or flags.offload_backend == "prefetch",
        reason="vLLM copies those weights from host memory that an exchange does not reach into every step",
        instead="use more ranks or a smaller model",
        reads="both",
    ),
    Row(
        name="weights-shared-with-preload",
        flags=("--load-format ipc_cache",),
        applies=_shares_weights,
        reason="the served weights are then in the memory of the `vllm preload` process, and an exchange would "
        "overwrite what it gives to engines that start later",
        instead='use --model-loader-extra-config \'{"mode": "copy"}\', or another --load-format',
    ),
    Row(
        name="weights-published-to-peers",
        flags=("--load-format modelexpress",),
        applies=lambda config: config.load_config.load_format in ("modelexpress", "mx"),  # its plugin has both names
        reason="ModelExpress lets engines that start later read the weights that are served as those of the checkpoint",
        instead="use another --load-format",
    ),
    Row(
        name="ray-workers",
        flags=("--distributed-executor-backend ray",),
        applies=lambda flags: (
            _uses_ray(flags.distributed_executor_backend)
            and os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") == "0"
        ),
        reason="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 asks for vLLM's older Ray executor, whose workers take calls while "
        "a step runs",
        instead="unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND, or use --distributed-executor-backend mp",
        reads="both",
    ),
    Row(
        name="ray-engines",
        flags=("--data-parallel-backend ray",),
        applies=lambda flags: flags.data_parallel_backend == "ray",
        reason="the daemon cannot watch engines that are Ray actors: a killed daemon would leave them "
        "behind with all their memory",
        instead="use --data-parallel-backend mp",
        reads="both",
    ),
    Row(
        name="adapters-on-other-hosts",
        flags=("--enable-lora",),
        applies=lambda config: (
            config.lora_config is not None
            and (
                config.parallel_config.nnodes > 1
                or config.parallel_config.data_parallel_size_local < config.parallel_config.data_parallel_size
            )
        ),
        reason="some workers run on other hosts, and an adapter is loaded from files that the daemon writes on its own "
        "host",
        instead="start a daemon on each host, or push merged weights",
    ),
    Row(
        name="pipeline-on-cpu",
        flags=("--pipeline-parallel-size",),
        applies=lambda config: _is_on_cpu(config) and config.parallel_config.pipeline_parallel_size > 1,
        reason="vLLM makes the buffers of the later ranks in a warm-up, which it leaves out there, and the first step "
        "ends the engine",
        instead="use --tensor-parallel-size",
        problem=_ON_CPU,
    ),
    Row(
        name="spread-experts-on-cpu",
        flags=("--data-parallel-size", "--enable-expert-parallel"),
        applies=lambda config: _is_on_cpu(config) and _spreads_experts(config),
        reason="vLLM has no collective calls there to exchange tokens between the ranks of a mixture of experts, and "
        "the first step ends the engine",
        instead="use --tensor-parallel-size alone, or start a daemon for each replica (genserve up)",
        problem=_ON_CPU,
    ),
    Row(
        name="draft-model",
        flags=("--speculative-config",),
        applies=_drafts_from_elsewhere,
        reason="pushes do not contain the weights of a draft model with its own checkpoint (such as EAGLE): tokens "
        "stay right, but fewer drafts are accepted with every version",
        instead="restart with a newly trained draft model now and then, draft with layers of the served checkpoint "
        "(MTP), which pushes contain, or use ngram",
        refused=False,
    ),
    Row(
        name="kv-connector-without-reset",
        flags=("--kv-transfer-config",),
        applies=_keeps_old_keys,
        reason="this connector does not drop its keys and values when a push asks it to: those of old weights would be "
        "reused",
        instead=f"use one of {', '.join(sorted(RESETTING_CONNECTORS))}, or empty the connector after every push",
        refused=False,
    ),
    Row(
        name="encoder-connector",
        flags=("--ec-transfer-config",),
        applies=lambda config: config.ec_transfer_config is not None,
        reason="after a push vLLM drops its own embeddings of images, but not those of the connector",
        instead="empty the connector after every push",
        refused=False,
    ),
    *UNREACHED,
)
"""The order of the messages."""
