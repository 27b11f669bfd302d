"""Sizes, rates and times as people read them."""

from datetime import UTC, datetime, timedelta

import pytest

from genserve.cli.quantities import age_text, mean_rate, rate_text, share_text, size_text, sizes_text

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (269_000_000, "269 MB"), (1_260_000_000, "1.26 GB"),
     (12_600_000_000, "12.6 GB"), (3_000_000_000_000, "3.00 TB")],
)  # fmt: skip
def test_a_size_has_three_digits(size_bytes: int, text: str) -> None:
    """In the largest unit that fits."""
    assert size_text(size_bytes) == text


def test_two_sizes_have_one_unit() -> None:
    """That of the whole, so that they can be compared."""
    assert sizes_text(160_000_000, 1_260_000_000) == "0.16/1.26 GB"
    assert sizes_text(0, 0) == "0/0 B"


def test_a_share_is_whole_only_when_nothing_is_missing() -> None:
    """A push of nothing has everything."""
    assert [share_text(part, 1000) for part in (0, 999, 1000)] == ["0%", "99%", "100%"]
    assert share_text(0, 0) == "100%"


def test_a_rate_needs_a_time() -> None:
    """And counts from its beginning."""
    assert mean_rate(3_000_000_000, NOW - timedelta(seconds=2), NOW) == 1.5e9
    assert mean_rate(3, NOW, NOW) is None
    assert mean_rate(3, None, NOW) is None
    assert [rate_text(each) for each in (1.5e9, 2e7, 3_140_000, 0)] == [
        "1.50 GB/s",
        "0.02 GB/s",
        "3.1 MB/s",
        "0.0 MB/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7260, "2 h 1 min"), (176_400, "2 d 1 h")],
)
def test_an_age_has_at_most_two_units(seconds: float, text: str) -> None:
    """Rounded down."""
    assert age_text(seconds) == text
