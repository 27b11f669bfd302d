"""The names of vLLM's two model runners, for the daemon and its workers. Imports neither torch nor vLLM."""

from typing import Any, Final

V1: Final = "v1"
V2: Final = "v2"
"""vLLM calls it Model Runner V2: its runner wherever Triton is, so on every GPU."""


def runner_of(resolved: Any) -> str:
    """The model runner of a worker of vLLM, or the one that vLLM gives to the workers of a VllmConfig.

    internal: both have `use_v2_model_runner`."""
    return V2 if resolved.use_v2_model_runner else V1
