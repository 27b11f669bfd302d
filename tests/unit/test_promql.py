"""What holds the queries of the dashboard and of the alerts to an exposition."""

import pytest

from tests.support.promql import alerts, faults, panels
from tests.support.scraped import parsed

SCRAPE = parsed("""# TYPE phase gauge
phase{phase="RUNNING"} 1
phase{phase="DEAD"} 0
# TYPE calls counter
calls_total{code="OK"} 1
""")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ('sum by (code, instance) (rate(calls_total{code!="OK", job="x"}[5m]))', []),
        ('phase{phase=~"RUNNING|DEAD"} == 1 unless on (instance) calls_total > 0', []),
        ("calls > 1", ["no series calls"]),
        ('histogram_quantile(0.9, rate(calls_total{method="m"}[5m]))', ["calls_total has no label method"]),
        ('phase{phase=~"RUNNING|PAUSE"}', ["phase has no phase PAUSE"]),
        ("sum by (le) (calls_total) / (-phase)", ["no series of it has the label le"]),
        ("phase + on (host) calls_total", ["no series of it has the label host"]),
    ],
)
def test_what_a_query_asks_for_in_vain_is_found(query: str, found: list[str]) -> None:
    """A name that was misspelt, or a label that went away, would be an alert that never comes."""
    assert faults(query, SCRAPE) == found


def test_a_query_with_wrong_syntax_is_an_error() -> None:
    """Prometheus would not load the rule."""
    with pytest.raises(ValueError, match="unclosed"):
        faults("sum(phase", SCRAPE)


def test_there_are_alerts_and_panels() -> None:
    """The tests of them would pass otherwise."""
    assert len(alerts()) > 10 and len(panels()) > 20
