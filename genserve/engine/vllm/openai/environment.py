"""The environment of an OpenAI server, which does not control the engine."""

from collections.abc import Mapping
from typing import Final

_DROPPED: Final = frozenset(
    {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_SCALE_OUT_ENDPOINTS"}
)
"""They would open routes that pause the engine, update its weights, load adapters or abort requests."""


def of_server(environment: Mapping[str, str]) -> dict[str, str]:
    """The daemon's, without what would open such routes."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}
