"""vLLM's settings, as far as the daemon and its workers read them alike. Imports neither torch nor vLLM.

Owns the names by which the daemon reaches its workers before it can call them, and what follows from a VllmConfig:
the model runner, whether pushes contain the weights of the draft model, and which weights are quantised while they are
loaded.
"""

from collections.abc import Iterator
from typing import Any, Final

EXTENSION = "genserve.worker.extension.WeightExchangeExtension"
"""Qualified name for vLLM's `worker_extension_cls`."""

RESERVING_WORKER = "genserve.worker.update.reserving.ReservingWorker"
"""Qualified name for vLLM's `worker_cls` on a GPU."""

WEIGHT_UPDATE_KEY = "genserve_weight_update"
"""In vLLM's `additional_config`, which workers get before they load the model: --weight-update."""

RANKS_HERE_KEY = "genserve_ranks_here"
"""There as well: how many workers of the engine share the memory of this host."""

DAEMON_PID_VARIABLE = "GENSERVE_DAEMON_PID"
"""In the environment of the engine's processes: the process with which they end."""


V1: Final = "v1"
V2: Final = "v2"
"""vLLM calls it Model Runner V2: its runner wherever Triton is, so on every GPU."""


def runner_of(resolved: Any) -> str:
    """The model runner of a worker of vLLM, or the one that vLLM gives to the workers of a VllmConfig.

    internal: both have `use_v2_model_runner`."""
    return V2 if resolved.use_v2_model_runner else V1


def drafts_with_served_checkpoint(config: Any) -> bool:
    """Whether the draft model's weights are in the served checkpoint, and so in every complete push: layers for
    multi-token prediction (MTP). `config`: a VllmConfig, or an object with its fields."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != "mtp" or speculative.draft_model_config is None:
        return False
    return bool(speculative.draft_model_config.model == config.model_config.model)


EXPERTS_INT8: Final = "experts_int8"
"""vLLM's older name for experts in int8; its configuration has no spec."""

# Types of weights whose scales belong to blocks: no rank needs the data of another one.
_BLOCK_LOCAL: Final = frozenset({"fp8_per_block", "mxfp8", "mxfp4"})


def online_specs(config: Any) -> Iterator[Any]:
    """The types to which vLLM quantises weights while it loads them from a checkpoint that has them in full: its
    QuantSpec, or name, for each kind of layer.

    internal: `quant_config` of a VllmConfig. vLLM's get_quant_config (model_executor/model_loader/weight_utils.py)
    makes an OnlineQuantizationConfig, composes one with what the checkpoint has, or makes an ExpertsInt8Config. The
    name alone does not tell: mxfp4, mxfp8 and fp8 are names of checkpoints too, and what is composed goes by the
    checkpoint's name."""
    quantised = config.quant_config
    composed = getattr(quantised, "online_quantization_config", None)
    for each in (quantised, composed):
        args = getattr(each, "args", None)  # the settings of an OnlineQuantizationConfig
        for spec in (getattr(args, "linear", None), getattr(args, "moe", None)):
            if spec is not None and spec.weight is not None:
                yield spec
        yield from (getattr(args, "targets", None) or {}).values()
    if config.model_config.quantization == EXPERTS_INT8:
        yield EXPERTS_INT8


def quantizes_online(config: Any) -> bool:
    """Whether any weights are quantised while they are loaded."""
    return any(True for _ in online_specs(config))


def is_block_local(spec: Any) -> bool:
    """Whether a rank quantises its part without the others."""
    if isinstance(spec, str):
        return spec in _BLOCK_LOCAL
    shape = spec.weight.scale.group_shape  # of a tensor, channel or token: -1 in a dimension
    return spec.weight.scale2 is None and shape.row > 0 and shape.col > 0
