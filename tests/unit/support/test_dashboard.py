"""What Grafana makes of the dashboard, without Grafana."""

import pytest

from tests.support.dashboard import NUM_COLUMNS, Dashboard, any_of, legend, lines, rate_interval_s, scale, sent

DASHBOARD = Dashboard.read()


def test_panels_lie_inside_the_grid_and_do_not_overlap() -> None:
    """Grafana would move them, and a picture would show one above the other."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD.panels:
        place = panel.place
        cells = {(x, y) for x in range(place.x, place.x + place.width) for y in range(place.y, place.y + place.height)}
        assert not cells & taken, panel.title
        assert all(0 <= x < NUM_COLUMNS for x, _ in cells), panel.title
        taken |= cells
    assert len(taken) == NUM_COLUMNS * DASHBOARD.height


def test_each_panel_has_queries_with_names_and_a_unit_that_can_be_written() -> None:
    """A row has none."""
    for panel in DASHBOARD.panels:
        assert panel.is_row is (panel.targets == ()), panel.title
        assert all(target.query and target.legend for target in panel.targets), panel.title
        assert scale(panel.unit, 1.0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["10.0.0.1:9400"], r"10\\.0\\.0\\.1:9400"),
        (["a", "b|c"], r"(a|b\\|c)"),
        (["a\\b"], r"a\\\\b"),
    ],
)
def test_a_variable_matches_its_values_and_nothing_else(names: list[str], expected: str) -> None:
    """A string of PromQL takes one of two backslashes away, and a regular expression the other."""
    assert any_of(names) == expected


def test_a_query_is_sent_without_variables() -> None:
    """One that Grafana does not know would be sent as it stands."""
    assert sent('rate(a{i=~"$instance"}[$__rate_interval])', "4s", "(a|b)") == 'rate(a{i=~"(a|b)"}[4s])'
    with pytest.raises(ValueError, match="not known"):
        sent("rate(a[$__range])", "4s", "a")


@pytest.mark.parametrize(("step_s", "scrape_s", "expected"), [(1, 1, 4), (1, 15, 60), (60, 15, 75)])
def test_a_rate_has_samples_enough(step_s: int, scrape_s: int, expected: int) -> None:
    """Four scrapes, or all since the point before."""
    assert rate_interval_s(step_s, scrape_s) == expected


def test_a_series_is_named_by_its_labels() -> None:
    """A label that it does not have, by the name of the label."""
    assert (
        legend("{{ instance }} {{phase}} of {{nobody}}", {"instance": "a", "phase": "PAUSED"}) == "a PAUSED of nobody"
    )


@pytest.mark.parametrize(
    ("unit", "largest", "expected"),
    [
        ("s", 0.02, (1e-3, " ms")),
        ("s", 1.0, (1, " s")),
        ("s", 0.0, (1e-6, " µs")),
        ("bytes", 3 << 20, (2**20, " MiB")),
        ("Bps", 5e6, (1e6, " MB/s")),
        ("percentunit", 0.004, (0.01, "%")),
        ("none", 900.0, (1, "")),
    ],
)
def test_values_are_written_in_a_unit_of_their_size(unit: str, largest: float, expected: tuple[float, str]) -> None:
    """As Grafana writes them."""
    assert scale(unit, largest) == expected


def test_entries_of_a_legend_go_to_the_next_line_when_there_is_no_room() -> None:
    """One that is wider than the panel has a line for itself."""
    assert lines([40, 40, 40, 200, 10], 100) == [[0, 1], [2], [3], [4]]
    assert lines([200], 100) == [[0]]
    assert lines([], 100) == [[]]
