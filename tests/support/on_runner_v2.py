"""Whether `scripts/test --runner-v2` runs: vLLM's Model Runner V2 in Triton's interpreter."""

import os
from typing import Final

IS_ON: Final = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a run. Engines then say that they have the runner "v2"."""


def fewer(number: int) -> int:
    """How many tokens a test generates, or how many streams, that would be so many: interpreted, they take long."""
    return number // 3 if IS_ON else number
