"""The engine's load, from the statistics that vLLM passes to a stat logger."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from genserve.engine.types import Load
from genserve.engine.vllm.clients.interruption import Interruptions
from genserve.engine.vllm.clients.rows import RATE_WINDOW_S, ClientRow


class LoadMeter:
    """Collects statistics of every data-parallel engine. An instance is vLLM's `stat_loggers` factory and its own
    product: one object takes the records of all engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_ns: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._tokens: deque[tuple[float, int]] = deque()
        self._queries = 0
        self._hits = 0
        self.interruptions = Interruptions()
        """Of the daemon's sequences."""
        self.others: Sequence[ClientRow] = ()
        """What vLLM told other clients of the engine: each step's statistics go to one client."""

    def load(self, num_active: int) -> Load:
        """The load with `num_active` admitted and unfinished sequences. vLLM reports only when it steps, so its last
        report is limited by what is known here."""
        self._read_others()
        waiting = min(sum(self._waiting.values()), num_active)
        now = self._clock()
        self._forget_before(now - RATE_WINDOW_S)
        usages = self._kv_usage.values()
        num_tokens = sum(count for _, count in self._tokens) + sum(each.num_recent_tokens() for each in self.others)
        looked_up = [(self._queries, self._hits), *(each.prefix_cache for each in self.others)]
        queries, hits = (sum(numbers) for numbers in zip(*looked_up, strict=True))
        return Load(
            running=num_active - waiting,
            waiting=waiting,
            kv_usage=sum(usages) / len(usages) if num_active and usages else 0.0,
            tokens_per_second=num_tokens / RATE_WINDOW_S,
            prefix_cache_hit_rate=hits / queries if queries else 0.0,
        )

    def steps(self) -> int:
        """How many steps were reported, by the data-parallel engine with the fewest."""
        steps = dict(self._steps)
        for each in self.others:
            for index, stats in enumerate(each.engines()):
                steps[index] = steps.get(index, 0) + stats.steps
        return min(steps.values(), default=0)

    def _read_others(self) -> None:
        for each in self.others:
            for index, stats in enumerate(each.engines()):
                if stats.at_ns > self._at_ns.get(index, 0):
                    self._at_ns[index] = stats.at_ns
                    self._waiting[index], self._kv_usage[index] = stats.waiting, stats.kv_usage

    def _forget_before(self, oldest: float) -> None:
        while self._tokens and self._tokens[0][0] < oldest:
            self._tokens.popleft()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "LoadMeter":
        """vLLM's factory."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM's hook: one engine made a step. Its statistics come to one client only."""
        if scheduler_stats is not None:
            self._steps[engine_idx] = self._steps.get(engine_idx, 0) + 1
            self._at_ns[engine_idx] = time.monotonic_ns()
            self._waiting[engine_idx] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_usage[engine_idx] = scheduler_stats.kv_cache_usage
            self._queries += scheduler_stats.prefix_cache_stats.queries
            self._hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is None:
            return
        self.interruptions.step(iteration_stats)
        if iteration_stats.num_generation_tokens:
            now = self._clock()
            self._tokens.append((now, iteration_stats.num_generation_tokens))
            self._forget_before(now - RATE_WINDOW_S)

    def log(self) -> None:
        """vLLM's hook; nothing to do."""

    def log_engine_initialized(self) -> None:
        """vLLM's hook; nothing to do."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM's hook; nothing to do."""

    def record_admission_rejection(self, reason: str) -> None:
        """vLLM's hook; nothing to do."""
