"""Which weights vLLM quantises while it loads them, from a checkpoint that has them in full.

Read from a VllmConfig, without torch and vllm: the daemon asks as well as the workers.

internal: `quant_config` of a VllmConfig. vLLM's get_quant_config (model_executor/model_loader/weight_utils.py) makes an
OnlineQuantizationConfig, composes one with what the checkpoint has, or makes an ExpertsInt8Config. The name alone does
not tell: mxfp4, mxfp8 and fp8 are names of checkpoints too, and what is composed goes by the checkpoint's name.
"""

from collections.abc import Iterator
from typing import Any, Final

EXPERTS_INT8: Final = "experts_int8"
"""vLLM's older name for experts in int8; its configuration has no spec."""

# Those whose scales belong to blocks: no rank needs the data of another one.
_BLOCK_LOCAL: Final = frozenset({"fp8_per_block", "mxfp8", "mxfp4"})


def specs(config: Any) -> Iterator[Any]:
    """The types to which weights are quantised while they are loaded: vLLM's QuantSpec, or name, for each kind of
    layer."""
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


def is_online(config: Any) -> bool:
    """Whether any weights are quantised while they are loaded."""
    return any(True for _ in specs(config))


def is_block_local(spec: Any) -> bool:
    """Whether a rank quantises its part without the others."""
    if isinstance(spec, str):
        return spec in _BLOCK_LOCAL
    shape = spec.weight.scale.group_shape  # of a tensor, channel or token: -1 in a dimension
    return spec.weight.scale2 is None and shape.row > 0 and shape.col > 0
