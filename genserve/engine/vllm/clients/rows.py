"""Figures that each client of the engine shares with the others: its load, and what vLLM reported to it.

vLLM sends the statistics of a step to one client only, that whose requests come first. So each client writes what it
gets to its own row, and the daemon reads all rows.
"""

import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from genserve.engine.staleness import CLASSES, class_of
from genserve.engine.types import Load
from genserve.engine.vllm.clients.interruption import Interruptions
from genserve.memory.words import SharedWords

RATE_WINDOW_S = 5.0
_SEQUENCES, _REQUESTS, _QUERIES, _HITS = range(4)
# Output tokens by the quarter of a second in which they came: the quarter's number, and theirs.
_QUARTER_S = 0.25
_NUM_QUARTERS = 24
_FIRST_QUARTER = 4
_FIRST_CLASS = _FIRST_QUARTER + 2 * _NUM_QUARTERS  # tokens of ended sequences, by how far they were behind
_FIRST_ENGINE = _FIRST_CLASS + len(CLASSES)
# Of each data-parallel engine: when the statistics came (ns), and what they were.
_AT, _WAITING, _KV_USAGE, _STEPS = range(4)
_ENGINE_WORDS = 4
# vLLM's own counters of unfinished requests, for --max-num-queued-reqs, are as far apart as a cache line is long.
_COUNTER_WORDS = 8


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The last statistics of one data-parallel engine that came to one client, and its steps that this client knows.
    `at_ns` is on the monotonic clock."""

    at_ns: int
    waiting: int
    kv_usage: float
    steps: int


@dataclass(frozen=True, slots=True)
class RowStats:
    """The load in the row of one client. `num_sequences`: admitted and unfinished; `num_queries` and
    `num_hits`: tokens looked up in the prefix cache, and those found; `num_recent_tokens`: output tokens within the
    last seconds of RATE_WINDOW_S; `engines`: the statistics of each data-parallel engine."""

    num_sequences: int
    num_queries: int
    num_hits: int
    num_recent_tokens: int
    engines: Sequence[EngineStats]


class ClientRow:
    """The row of one client. Only this client writes it, and whoever clears it after its death. As vLLM's stat logger
    it is its own factory."""

    def __init__(self, words: SharedWords, start: int, num_engines: int, clock: Callable[[], float]) -> None:
        self._ints = words.ints
        self._floats = words.floats
        self._start = start
        self._num_engines = num_engines
        self._clock = clock
        self.interruptions = Interruptions()
        """Of the client's sequences, if this is its own process."""
        self.after_step: Callable[[], None] | None = None
        """Called in the client's own process, after vLLM has processed the outputs of a step."""

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and unfinished."""
        return self._ints[self._start + _SEQUENCES]

    @property
    def num_requests(self) -> int:
        """Requests admitted and unfinished."""
        return self._ints[self._start + _REQUESTS]

    def clear(self) -> None:
        """Nothing has been counted."""
        for at in range(self._start, self._start + _row_words(self._num_engines)):
            self._ints[at] = 0

    def publish(self, num_sequences: int, num_requests: int) -> None:
        """Sets what is admitted and unfinished."""
        self._ints[self._start + _SEQUENCES] = num_sequences
        self._ints[self._start + _REQUESTS] = num_requests

    def served(self, num_versions: int, num_tokens: int) -> None:
        """A sequence has ended: this many of its tokens were this far behind the served version."""
        self._ints[self._start + _FIRST_CLASS + class_of(num_versions)] += num_tokens

    @property
    def served_tokens(self) -> list[int]:
        """Tokens of the sequences that have ended, by class of `staleness`. Those of a client that has died count."""
        first = self._start + _FIRST_CLASS
        return list(self._ints[first : first + len(CLASSES)])

    def stats(self) -> RowStats:
        """The load now."""
        ints, floats, start = self._ints, self._floats, self._start
        oldest = int((self._clock() - RATE_WINDOW_S) / _QUARTER_S)
        quarters = range(start + _FIRST_QUARTER, start + _FIRST_QUARTER + 2 * _NUM_QUARTERS, 2)
        first_engine = start + _FIRST_ENGINE
        engines = range(first_engine, first_engine + _ENGINE_WORDS * self._num_engines, _ENGINE_WORDS)
        return RowStats(
            ints[start + _SEQUENCES],
            ints[start + _QUERIES],
            ints[start + _HITS],
            sum(ints[at + 1] for at in quarters if ints[at] > oldest),
            [
                EngineStats(ints[at + _AT], ints[at + _WAITING], floats[at + _KV_USAGE], ints[at + _STEPS])
                for at in engines
            ],
        )

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "ClientRow":
        """vLLM's factory."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM's hook: outputs of one engine came, or statistics, or both."""
        if scheduler_stats is not None:
            at, ints = self._start + _FIRST_ENGINE + _ENGINE_WORDS * engine_idx, self._ints
            ints[at + _WAITING] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._floats[at + _KV_USAGE] = scheduler_stats.kv_cache_usage
            ints[at + _STEPS] += 1
            ints[at + _AT] = time.monotonic_ns()
            ints[self._start + _QUERIES] += scheduler_stats.prefix_cache_stats.queries
            ints[self._start + _HITS] += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is None:
            return
        if self.after_step is not None:
            self.after_step()
        self.interruptions.step(iteration_stats)
        if num_tokens := iteration_stats.num_generation_tokens:
            quarter = int(self._clock() / _QUARTER_S)
            at = self._start + _FIRST_QUARTER + 2 * (quarter % _NUM_QUARTERS)
            if self._ints[at] != quarter:
                self._ints[at + 1] = 0
                self._ints[at] = quarter
            self._ints[at + 1] += num_tokens

    def log(self) -> None:
        """vLLM's hook; nothing to do."""

    def log_engine_initialized(self) -> None:
        """vLLM's hook; nothing to do."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """vLLM's hook; nothing to do."""

    def record_admission_rejection(self, reason: str) -> None:
        """vLLM's hook; nothing to do."""


class ClientRows:
    """The rows of `num_clients` clients of `num_engines` data-parallel engines."""

    def __init__(
        self, words: SharedWords, num_clients: int, num_engines: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._words = words
        self._num_clients = num_clients
        self._num_engines = num_engines
        starts = range(0, num_clients * _row_words(num_engines), _row_words(num_engines))
        self._rows = [ClientRow(words, start, num_engines, clock) for start in starts]

    @classmethod
    def create(cls, num_clients: int, num_engines: int) -> "ClientRows":
        """New rows, all 0."""
        num_words = num_clients * (_row_words(num_engines) + _COUNTER_WORDS)
        return cls(SharedWords.create(num_words, "clients"), num_clients, num_engines)

    @property
    def fd(self) -> int:
        """The descriptor of the memory, for another client."""
        return self._words.fd

    @property
    def counters(self) -> memoryview:
        """vLLM's `mp_admission_counters`: each client counts its unfinished requests there, and limits their sum."""
        return self._words.ints[self._num_clients * _row_words(self._num_engines) :]

    def row(self, index: int) -> ClientRow:
        """The row of a client."""
        return self._rows[index]

    def tally(self, index: int) -> "RowTally":
        """The numbers of the other clients that client `index` needs to admit requests."""
        return RowTally(self.row(index), self.rows(but=index))

    def rows(self, *, but: int = -1) -> list[ClientRow]:
        """The rows of all clients, but one if asked."""
        return [row for index, row in enumerate(self._rows) if index != but]

    def close(self) -> None:
        """Unmaps them."""
        self._words.close()

    def vacate(self, index: int) -> None:
        """Records that a client has died, and with it its requests."""
        self.row(index).publish(0, 0)
        self.counters[index * _COUNTER_WORDS] = 0


class RowTally:
    """The requests that all clients have admitted, for one of them. Two clients may admit requests at the same moment,
    so the limit of all may be exceeded by what they admit then."""

    def __init__(self, own: ClientRow, others: Sequence[ClientRow]) -> None:
        self._others = others
        self.publish, self.served = own.publish, own.served

    @property
    def num_elsewhere(self) -> int:
        """Unfinished sequences of the other clients."""
        num_sequences = 0
        for each in self._others:
            num_sequences += each.num_sequences
        return num_sequences


class LoadMeter:
    """Reads the rows of all clients: the statistics of a step come to one of them only. `own` is that of the caller,
    whose sequences are those of `unfinished`."""

    def __init__(self, own: ClientRow, others: Sequence[ClientRow], unfinished: Sized) -> None:
        self._rows = (own, *others)
        self._unfinished = unfinished

    def load(self) -> Load:
        """The present load. vLLM reports only when it steps, so its last report is limited by what is known here."""
        rows = [row.stats() for row in self._rows]
        num_active = len(self._unfinished) + sum(row.num_sequences for row in rows[1:])
        of_each_engine = zip(*(row.engines for row in rows), strict=True)
        last = [max(reports, key=lambda each: each.at_ns) for reports in of_each_engine]
        reported = [each for each in last if each.at_ns]
        waiting = min(sum(each.waiting for each in reported), num_active)
        num_queries = sum(row.num_queries for row in rows)
        return Load(
            running=num_active - waiting,
            waiting=waiting,
            kv_usage=sum(each.kv_usage for each in reported) / len(reported) if num_active and reported else 0.0,
            tokens_per_second=sum(row.num_recent_tokens for row in rows) / RATE_WINDOW_S,
            prefix_cache_hit_rate=sum(row.num_hits for row in rows) / num_queries if num_queries else 0.0,
        )

    def served_tokens(self) -> list[int]:
        """Tokens of sequences that have ended, by class of `staleness`."""
        return [sum(each) for each in zip(*(row.served_tokens for row in self._rows), strict=True)]

    def steps(self) -> int:
        """How many steps were reported, by the data-parallel engine with the fewest of those that have reported."""
        each_row = [[engine.steps for engine in row.stats().engines] for row in self._rows]
        return min(filter(None, map(sum, zip(*each_row, strict=True))), default=0)


def _row_words(num_engines: int) -> int:
    num_words = _FIRST_ENGINE + _ENGINE_WORDS * num_engines
    return -(-num_words // _COUNTER_WORDS) * _COUNTER_WORDS  # whole cache lines
