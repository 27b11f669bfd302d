"""The settings of vLLM that cannot be used with pushed weights, or not at all on this device, and why.

This is a table, without vLLM: each row checks a VllmConfig, or an object with its fields. A refused setting would
corrupt or hang the engine at a push, perhaps hours after the start, so it is reported at the start, before a process
exists. A warning is for a setting with a cost that the user must know.

Rows that need only flags are checked twice: before vLLM makes a configuration, because its own checks may complain
first and ask for flags that belong to a refused one; and on the configuration, because other things set it too.

`worker.model.audit` finds what depends on the model and not on settings, such as weights that no exchange reaches.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from genserve.engine.vllm.start.failure import EngineStartError
from genserve.worker.contract import online_quantization
from genserve.worker.contract.drafting import drafts_with_served_checkpoint

Config = Any
"""A VllmConfig. Its fields are vLLM's: config/parallel.py, config/offload.py, config/speculative.py and so on."""
Flags = Any
"""vLLM's flags by their names, flat: a parsed namespace, AsyncEngineArgs, or SetFlags."""


@dataclass(frozen=True, slots=True)
class Row:
    """A setting. `name` never changes: documents and tests refer to it. `flags` are the flags that request it.
    `applies` says whether a configuration has it, or whether flags do if `by_flags`. `reason` is a clause after
    "because". `instead` is the beginning of a sentence that says what to do. `problem` is what is wrong with the
    setting. A row that is not `refused` is a warning."""

    name: str
    flags: tuple[str, ...]
    applies: Callable[[Config | Flags], bool]
    reason: str
    instead: str
    refused: bool = True
    by_flags: bool = False
    problem: str = ""

    @property
    def message(self) -> str:
        """One line for users."""
        about_pushes = "cannot be used with pushed weights" if self.refused else "has a cost when weights are pushed"
        problem = self.problem or about_pushes
        return f"{' or '.join(self.flags)} {problem}, because {self.reason}; {self.instead} [{self.name}]"


def check(config: Config) -> tuple[str, ...]:
    """The warnings for a configuration. Raises EngineStartError naming the flags if one is refused."""
    found = list(rows(config))
    _refuse(found)
    return tuple(row.message for row in found)


def check_flags(flags: Flags) -> None:
    """Raises EngineStartError naming the flags that are refused whatever the model is."""
    _refuse([row for row in TABLE if row.by_flags and row.applies(flags)])


def rows(config: Config) -> Iterator[Row]:
    """The rows that apply to a configuration."""
    flags = SetFlags(config)
    return (row for row in TABLE if row.applies(flags if row.by_flags else config))


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


def _refuse(found: Sequence[Row]) -> None:
    refused = [row.message for row in found if row.refused]
    if refused:
        raise EngineStartError("; ".join(refused))


# Speculative methods without their own weights.
_WITHOUT_DRAFT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
# Connectors that drop their keys and values if vLLM asks them to; the others do not answer, and vLLM takes this for a
# yes (distributed/kv_transfer/kv_connector/v1/base.py reset_cache).
_RESETTING_CONNECTORS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"})


def _quantises_over_ranks(config: Config) -> bool:
    parallel = config.parallel_config
    num_sharing = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if config.model_config.is_moe:
        num_sharing *= parallel.data_parallel_size  # experts are sharded over these too
    return num_sharing > 1 and any(
        not online_quantization.is_block_local(spec) for spec in online_quantization.specs(config)
    )


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
    transfer = config.kv_transfer_config
    return transfer is not None and any(name not in _RESETTING_CONNECTORS for name in _connectors(transfer))


def _connectors(transfer: Any) -> Sequence[str]:
    """Names of the connectors: those in a MultiConnector, or the only one."""
    if transfer.kv_connector != "MultiConnector":
        return [transfer.kv_connector]
    extra = transfer.kv_connector_extra_config or {}
    return [str(each.get("kv_connector", "")) for each in extra.get("connectors", [])]


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
        by_flags=True,
    ),
    Row(
        name="elastic-experts",
        flags=("--enable-elastic-ep",),
        applies=lambda flags: flags.enable_elastic_ep,
        reason="ranks that join later load the checkpoint's weights instead of the pushed ones",
        instead="start all ranks that you need at once",
        by_flags=True,
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
        by_flags=True,
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
        by_flags=True,
    ),
    Row(
        name="weights-prefetched-from-host",
        flags=("--offload-group-size", "--offload-backend prefetch"),
        applies=lambda flags: flags.offload_group_size > 0 or flags.offload_backend == "prefetch",
        reason="vLLM copies those weights from host memory that an exchange does not reach into every step",
        instead="use more ranks or a smaller model",
        by_flags=True,
    ),
    Row(
        name="weights-shared-with-preload",
        flags=("--load-format ipc_cache",),
        applies=_shares_weights,
        reason="the weights that are served lie in the memory of the `vllm preload` process then, and an exchange "
        "would write over what it gives to engines that start later",
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
        by_flags=True,
    ),
    Row(
        name="ray-engines",
        flags=("--data-parallel-backend ray",),
        applies=lambda flags: flags.data_parallel_backend == "ray",
        reason="the daemon cannot watch engines that are Ray actors: a killed daemon would leave them "
        "behind with all their memory",
        instead="use --data-parallel-backend mp",
        by_flags=True,
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
        reason="there vLLM makes the buffers of the later ranks in a warm-up that it leaves out without compiled code, "
        "and the first step ends the engine",
        instead="use --tensor-parallel-size",
        problem=_ON_CPU,
    ),
    Row(
        name="spread-experts-on-cpu",
        flags=("--data-parallel-size", "--enable-expert-parallel"),
        applies=lambda config: _is_on_cpu(config) and _spreads_experts(config),
        reason="there vLLM has not the collective calls by which ranks exchange tokens for the experts of a mixture, "
        "and the first step ends the engine",
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
        instead=f"use one of {', '.join(sorted(_RESETTING_CONNECTORS))}, or empty the connector after every push",
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
)
"""The order of the messages."""
