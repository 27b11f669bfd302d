"""Families of series, made of numbers that were counted elsewhere, and the text that a scraper gets: made in a thread,
and at most once in a while however many ask."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.utils import floatToGoString

from genserve.observe.histogram import Histogram

Family: TypeAlias = Metric
"""Series of one name."""
Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the number that they have."""

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
MIN_INTERVAL_S = 1.0
"""Between two texts. To make one takes the interpreter for tens of milliseconds if there are many series of vLLM's."""


def gauge(name: str, help: str, value: float) -> Family:
    """A number that rises and falls."""
    return GaugeMetricFamily(name, help, value=value)


def gauges(name: str, help: str, labels: Sequence[str], values: Labelled) -> Family:
    """Such a number for each value of the labels."""
    family = GaugeMetricFamily(name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def counter(name: str, help: str, value: float) -> Family:
    """A number that only rises; its series is `name`_total."""
    return CounterMetricFamily(name, help, value=value)


def counters(name: str, help: str, labels: Sequence[str], values: Labelled) -> Family:
    """Such a number for each value of the labels."""
    family = CounterMetricFamily(name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(name: str, help: str, values: Histogram) -> Family:
    """How large values were."""
    return HistogramMetricFamily(name, help, buckets=_buckets(values), sum_value=values.sum)


def histograms(name: str, help: str, label: str, values: Mapping[str, Histogram]) -> Family:
    """How large values were, for each value of the label."""
    family = HistogramMetricFamily(name, help, labels=[label])
    for label_value, each in values.items():
        family.add_metric([label_value], _buckets(each), each.sum)
    return family


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    names = [*map(_name, values.bounds), "+Inf"]
    return list(zip(names, accumulate(values.counts), strict=True))


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


class Registry(Protocol):
    """As in prometheus_client."""

    def collect(self) -> Iterable[Family]:
        """All families."""


class Exposition:
    """The series of `registry`, which may be collected in a thread, and what `read` returns, which is called on the
    event loop."""

    def __init__(
        self, registry: Registry, read: Callable[[], Iterable[Family]], min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._registry = registry
        self._read = read
        self._min_interval_s = min_interval_s
        self._text = b""
        self._until_s = float("-inf")
        self._turn = asyncio.Lock()

    async def text(self) -> bytes:
        """The series as they are now, or were a moment ago."""
        async with self._turn:
            if time.monotonic() >= self._until_s:
                families = _Families(list(self._read()), self._registry)
                self._text = await asyncio.to_thread(generate_latest, families)
                self._until_s = time.monotonic() + self._min_interval_s
            return self._text


class _Families:
    def __init__(self, read: list[Family], registry: Registry) -> None:
        self._read = read
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        yield from self._read
        yield from self._registry.collect()
