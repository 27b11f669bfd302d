"""vLLM's own series (`vllm:*`), which each client of the engine counts for its requests; or none of them."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger


class NoSeries(PrometheusStatLogger):
    """Counts nothing. vLLM adds its own logger unless there is one of this class, also with --disable-log-stats:
    a client's row needs the statistics."""

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] | None = None) -> None:
        pass

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Nothing."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


class BoundedSeries(PrometheusStatLogger):
    """vLLM's, but without the names of LoRA adapters, which are up to clients: each set of them that was ever used
    would stay a series."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self.gauge_lora_info = None  # internal: where vLLM sets it only if it is there


def stat_loggers(row: Any, *, with_series: bool) -> list[Any]:
    """What vLLM tells its statistics to: a client's row, and what counts its series, if they are wanted."""
    return [row, BoundedSeries if with_series else NoSeries]
