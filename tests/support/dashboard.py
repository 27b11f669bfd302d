"""The panels of the dashboard for Grafana, and what Grafana makes of them: queries, legends, places and units. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PATH = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboard.json"
NUM_COLUMNS = 24
_VARIABLE = re.compile(r"\{\{\s*(.+?)\s*\}\}")
_OF_REGEX = re.compile(r"[$^*{}\[\]'+?.()|]")
_SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "none": [(1, ""), (1e3, " K"), (1e6, " Mil")],
    "percentunit": [(0.01, "%")],
    "reqps": [(1, " req/s"), (1e3, "K req/s")],
    "s": [(1e-6, " µs"), (1e-3, " ms"), (1, " s"), (60, " min"), (3600, " hour")],
    "bytes": [(1, " B"), (2**10, " KiB"), (2**20, " MiB"), (2**30, " GiB")],
    "Bps": [(1, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s")],
}
"""By the names that Grafana has for units: how much one of each is, the smallest first, and how Grafana writes it."""


@dataclass(frozen=True)
class Place:
    """Where a panel is, in columns and rows of the grid."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Target:
    """One query of a panel, with Grafana's variables in it."""

    ref: str
    query: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """What is drawn; a row is only a title and has no targets. `least` and `largest` bound the axis of values."""

    title: str
    is_row: bool
    place: Place
    unit: str
    least: float | None
    largest: float | None
    is_stacked: bool
    fill: float
    targets: tuple[Target, ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """As the file has it."""
        defaults = given.get("fieldConfig", {}).get("defaults", {})
        custom = defaults.get("custom", {})
        place = given["gridPos"]
        return cls(
            given["title"],
            given["type"] == "row",
            Place(place["x"], place["y"], place["w"], place["h"]),
            defaults.get("unit", "none"),
            defaults.get("min"),
            defaults.get("max"),
            custom.get("stacking", {}).get("mode") == "normal",
            custom.get("fillOpacity", 0) / 100,
            tuple(Target(each["refId"], each["expr"], each["legendFormat"]) for each in given.get("targets", ())),
        )


@dataclass(frozen=True)
class Dashboard:
    """Its panels, from the top, and the queries of its annotations by their names."""

    title: str
    panels: tuple[Panel, ...]
    annotations: Mapping[str, str]

    @classmethod
    def read(cls, path: Path = PATH) -> Self:
        """The one of the project."""
        given = json.loads(path.read_text())
        annotations = {each["name"]: each["expr"] for each in given["annotations"]["list"]}
        return cls(given["title"], tuple(Panel.of(each) for each in given["panels"]), annotations)

    @property
    def height(self) -> int:
        """In rows of the grid."""
        return max(each.place.y + each.place.height for each in self.panels)


def sent(query: str, rate_interval: str, instance: str) -> str:
    """A query as Grafana sends it. `instance`: a regular expression, as a string of PromQL has it."""
    query = query.replace("$__rate_interval", rate_interval).replace("$instance", instance)
    if "$" in query.replace(instance, ""):
        raise ValueError(f"a variable that is not known: {query}")
    return query


def any_of(values: Sequence[str]) -> str:
    """The regular expression for a variable with these values, as Grafana writes it into a string of PromQL."""
    escaped = [_OF_REGEX.sub(r"\\\\\g<0>", value.replace("\\", r"\\\\")) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def rate_interval_s(step_s: int, scrape_interval_s: int) -> int:
    """Grafana's $__rate_interval: it has always samples enough for a rate."""
    return max(step_s + scrape_interval_s, 4 * scrape_interval_s)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """The name of a series; a label that it does not have is written as its name, as Grafana does."""
    return _VARIABLE.sub(lambda found: labels.get(found[1]) or found[1], template)


def scale(unit: str, largest: float) -> tuple[float, str]:
    """How much one of the unit is in which values up to `largest` read best, and how it is written."""
    scales = _SCALES[unit]
    return next((each for each in reversed(scales) if largest >= each[0]), scales[0])


def lines(widths: Sequence[float], room: float) -> list[list[int]]:
    """Which entries of a legend stand on which line: as many as there is room for, at least one."""
    placed: list[list[int]] = [[]]
    used = 0.0
    for number, width in enumerate(widths):
        if placed[-1] and used + width > room:
            placed.append([])
            used = 0.0
        placed[-1].append(number)
        used += width
    return placed
