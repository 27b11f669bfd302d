"""Values by size."""

import pytest

from genserve.observe.histogram import Histogram


def test_a_value_counts_at_the_first_bound_that_it_does_not_exceed() -> None:
    """Bounds are upper ones, themselves included, as in Prometheus; larger values have a place of their own."""
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 7.5


def test_bounds_have_to_ascend() -> None:
    """A value would be counted at the wrong one."""
    with pytest.raises(ValueError, match="ascend"):
        Histogram([2.0, 1.0])
