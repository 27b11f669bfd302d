"""The engine's load, from what vLLM has told its clients."""

from collections.abc import Sequence

from genserve.engine.types import Load
from genserve.engine.vllm.clients.rows import RATE_WINDOW_S, ClientRow, EngineStats


class LoadMeter:
    """Reads the rows of all clients: the statistics of a step come to one of them only."""

    def __init__(self, rows: Sequence[ClientRow]) -> None:
        self._rows = rows

    def load(self, num_active: int) -> Load:
        """The load with `num_active` admitted and unfinished sequences. vLLM reports only when it steps, so its last
        report is limited by what is known here."""
        last: dict[int, EngineStats] = {}  # of each data-parallel engine that has reported
        for row in self._rows:
            for index, stats in enumerate(row.engines()):
                if stats.at_ns > (last[index].at_ns if index in last else 0):
                    last[index] = stats
        waiting = min(sum(stats.waiting for stats in last.values()), num_active)
        queries, hits = (sum(numbers) for numbers in zip(*(row.prefix_cache for row in self._rows), strict=True))
        return Load(
            running=num_active - waiting,
            waiting=waiting,
            kv_usage=sum(stats.kv_usage for stats in last.values()) / len(last) if num_active and last else 0.0,
            tokens_per_second=sum(row.num_recent_tokens() for row in self._rows) / RATE_WINDOW_S,
            prefix_cache_hit_rate=hits / queries if queries else 0.0,
        )

    def served_tokens(self) -> list[int]:
        """Tokens of sequences that have ended, by class of `staleness`."""
        return [sum(each) for each in zip(*(row.served_tokens for row in self._rows), strict=True)]

    def steps(self) -> int:
        """How many steps were reported, by the data-parallel engine with the fewest of those that have reported."""
        each_row = [[stats.steps for stats in row.engines()] for row in self._rows]
        return min(filter(None, map(sum, zip(*each_row, strict=True))), default=0)
