"""What `scripts/test --runner-v2` leaves out, and why: tests with vLLM's Model Runner V2 in Triton's interpreter."""

import os
from collections.abc import Mapping
from typing import Final

IS_ON: Final = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a run. Engines then say that they have the runner "v2"."""

LEFT_OUT: Final[Mapping[str, str]] = {}
"""Ids of tests as pytest prints them, without parameters -> why they cannot run. A request with top-k or top-p is a
reason: Triton 3.7.1 does not interpret its kernel, and the engine ends. No test needs one so far."""


def fewer(number: int) -> int:
    """How many tokens a test generates, or how many streams, that would be so many: interpreted, they take long."""
    return number // 3 if IS_ON else number


def reason(node_id: str) -> str | None:
    """Why a test is left out; None if it is not."""
    return LEFT_OUT.get(node_id.partition("[")[0]) if IS_ON else None
