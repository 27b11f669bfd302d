"""Which variables of the environment of `up` its daemons on other nodes get too. Pure."""

from collections.abc import Mapping
from typing import Final

_PREFIXES: Final = ("VLLM_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "GENSERVE_")
"""As vLLM carries them to its own workers on Ray: settings of the engine and of the hub, and tokens."""
_OTHERS: Final = ("PYTHONHASHSEED", "OMP_NUM_THREADS")
_OF_ONE_HOST: Final = frozenset({"VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_PORT", "VLLM_DP_MASTER_IP"})


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """What is true on each node. All else is as the node has it."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_PREFIXES) or name in _OTHERS) and name not in _OF_ONE_HOST
    }
