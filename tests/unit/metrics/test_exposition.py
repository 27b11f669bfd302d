"""The text for scrapers."""

import asyncio

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from genserve.metrics.exposition import Exposition, counter, gauges, histogram
from genserve.observe.histogram import Histogram


async def test_what_is_read_and_what_is_registered_are_one_text() -> None:
    """A scraper parses it."""
    registry = CollectorRegistry()
    Counter("calls", "Calls.", ["code"], registry=registry).labels("OK").inc()
    values = Histogram([1.0, 2.5])
    values.add(2.0)
    values.add(9.0)
    read = [counter("pushes", "P.", 3), gauges("phase", "F.", ["phase"], [(["A"], 1)]), histogram("s", "S.", values)]
    text = (await Exposition(registry, lambda: read).text()).decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples == {
        ("pushes_total",): 3,
        ("phase", "A"): 1,
        ("s_bucket", "1.0"): 0,
        ("s_bucket", "2.5"): 1,
        ("s_bucket", "+Inf"): 2,
        ("s_count",): 2,
        ("s_sum",): 11,
        ("calls_total", "OK"): 1,
    }


async def test_scrapers_that_ask_together_or_too_often_get_one_text() -> None:
    """However many there are, the work is bounded; afterwards there is a new one."""
    num_reads = 0

    def read() -> list:  # type: ignore[type-arg]
        nonlocal num_reads
        num_reads += 1
        return [counter("reads", "R.", num_reads)]

    often = Exposition(CollectorRegistry(), read, min_interval_s=60.0)
    texts = await asyncio.gather(*(often.text() for _ in range(20)))
    assert (len(set(texts)), num_reads) == (1, 1)
    always = Exposition(CollectorRegistry(), read, min_interval_s=0.0)
    assert await always.text() != await always.text()
