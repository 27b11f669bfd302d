"""The load, from what vLLM reports when it steps."""

from types import SimpleNamespace

from genserve.engine.vllm.clients.rows import ClientRows, LoadMeter
from genserve.memory.words import SharedWords


def step(waiting: int, kv_usage: float, queries: int, hits: int) -> SimpleNamespace:
    """A scheduler's statistics."""
    return SimpleNamespace(
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=kv_usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def test_what_was_reported_last_is_bounded_by_what_is_known_to_be_active() -> None:
    """vLLM reports nothing more once it is idle."""
    rows = ClientRows.create(1, 1)
    meter = LoadMeter(rows.rows())
    rows.row(0).record(step(3, 0.5, 10, 5), None)
    assert (meter.load(8).running, meter.load(8).waiting, meter.load(8).kv_usage) == (5, 3, 0.5)
    assert (meter.load(0).running, meter.load(0).waiting, meter.load(0).kv_usage) == (0, 0, 0.0)
    assert meter.load(0).prefix_cache_hit_rate == 0.5


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    """Tokens per second are those of the last five seconds, over all engines."""
    now = 0.0
    rows = ClientRows(SharedWords.create(1000, "test"), 1, 2, lambda: now)
    meter = LoadMeter(rows.rows())
    for engine in (0, 1):
        rows.row(0).record(None, SimpleNamespace(num_generation_tokens=50), engine_idx=engine)
    now = 4.0
    assert meter.load(1).tokens_per_second == 20.0
    now = 6.0
    assert meter.load(1).tokens_per_second == 0.0


def test_requests_that_the_scheduler_has_skipped_wait_too() -> None:
    """For a constraint that is compiled, or for a LoRA adapter: vLLM counts them apart."""
    rows = ClientRows.create(1, 1)
    meter = LoadMeter(rows.rows())
    statistics = step(3, 0.5, 10, 5)
    statistics.num_skipped_waiting_reqs = 2
    rows.row(0).record(statistics, None)
    assert (meter.load(8).running, meter.load(8).waiting) == (3, 5)
