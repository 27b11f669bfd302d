"""What vLLM's processes do otherwise over the fake runtime. vLLM calls `load` in each of them, as a plugin."""

import os
from typing import Final

DRAFTS: Final = "GENSERVE_FAKE_CUDA_DRAFTS"
"""Set for a daemon that drafts: the kernel that accepts tokens does nothing, so that no request of its would end. The
first step of the daemon is one."""


async def _no_step(*args: object) -> None:
    """In the place of `first_step.take`."""


def load() -> None:
    """Leaves the first step out where it would not end."""
    if os.environ.get(DRAFTS) == "1":
        from genserve.engine.vllm.start import first_step

        first_step.take = _no_step
