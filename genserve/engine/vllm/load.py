"""The engine's load, from the statistics that vLLM passes to a stat logger."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from genserve.engine.types import Load

_RATE_WINDOW_S = 5.0


class LoadMeter:
    """Collects statistics of every data-parallel engine. An instance is vLLM's `stat_loggers` factory and its own
    product: one object takes the records of all engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._tokens: deque[tuple[float, int]] = deque()
        self._queries = 0
        self._hits = 0

    def load(self, num_active: int) -> Load:
        """The load with `num_active` admitted and unfinished sequences. vLLM reports only when it steps, so its last
        report is limited by what is known here."""
        waiting = min(sum(self._waiting.values()), num_active)
        now = self._clock()
        self._forget_before(now - _RATE_WINDOW_S)
        usages = self._kv_usage.values()
        return Load(
            running=num_active - waiting,
            waiting=waiting,
            kv_usage=sum(usages) / len(usages) if num_active and usages else 0.0,
            tokens_per_second=sum(count for _, count in self._tokens) / _RATE_WINDOW_S,
            prefix_cache_hit_rate=self._hits / self._queries if self._queries else 0.0,
        )

    def steps(self) -> int:
        """How many steps were reported, by the data-parallel engine with the fewest."""
        return min(self._steps.values(), default=0)

    def _forget_before(self, oldest: float) -> None:
        while self._tokens and self._tokens[0][0] < oldest:
            self._tokens.popleft()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "LoadMeter":
        """vLLM's factory."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM's hook: one engine made a step."""
        self._steps[engine_idx] = self._steps.get(engine_idx, 0) + 1
        if scheduler_stats is not None:
            self._waiting[engine_idx] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_usage[engine_idx] = scheduler_stats.kv_cache_usage
            self._queries += scheduler_stats.prefix_cache_stats.queries
            self._hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            now = self._clock()
            self._tokens.append((now, iteration_stats.num_generation_tokens))
            self._forget_before(now - _RATE_WINDOW_S)

    def log(self) -> None:
        """vLLM's hook; nothing to do."""

    def log_engine_initialized(self) -> None:
        """vLLM's hook; nothing to do."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM's hook; nothing to do."""

    def record_admission_rejection(self, reason: str) -> None:
        """vLLM's hook; nothing to do."""
