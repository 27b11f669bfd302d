"""The load, from what vLLM reports when it steps."""

from types import SimpleNamespace

from genserve.engine.vllm.load import LoadMeter


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
    meter = LoadMeter(clock=lambda: 0.0)
    meter.record(step(3, 0.5, 10, 5), None)
    assert (meter.load(8).running, meter.load(8).waiting, meter.load(8).kv_usage) == (5, 3, 0.5)
    assert (meter.load(0).running, meter.load(0).waiting, meter.load(0).kv_usage) == (0, 0, 0.0)
    assert meter.load(0).prefix_cache_hit_rate == 0.5


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    """Tokens per second are those of the last five seconds, over all engines."""
    now = 0.0
    meter = LoadMeter(clock=lambda: now)
    for engine in (0, 1):
        meter.record(None, SimpleNamespace(num_generation_tokens=50), engine_idx=engine)
    now = 4.0
    assert meter.load(1).tokens_per_second == 20.0
    now = 6.0
    assert meter.load(1).tokens_per_second == 0.0


def test_requests_that_the_scheduler_has_skipped_wait_too() -> None:
    """For a constraint that is compiled, or for a LoRA adapter: vLLM counts them apart."""
    meter = LoadMeter(clock=lambda: 0.0)
    statistics = step(3, 0.5, 10, 5)
    statistics.num_skipped_waiting_reqs = 2
    meter.record(statistics, None)
    assert (meter.load(8).running, meter.load(8).waiting) == (3, 5)
