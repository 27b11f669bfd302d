"""Families of series, made of numbers that were counted elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from genserve.observe.histogram import Histogram

Family: TypeAlias = Metric
"""Series of one name."""
Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the number that they have."""


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
