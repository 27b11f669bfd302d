"""A platform plugin of vLLM's: engines on a CPU prepare a step while the one before it is computed, as on a GPU.

vLLM switches that off on CPUs (platforms/cpu.py: "async scheduling is not required on CPU"), although Model Runner V2
can do it there. A pause and a push then find two steps in flight.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class AsyncCpuPlatform(CpuPlatform):
    """A CPU with asynchronous scheduling."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As on any CPU, but for that."""
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
