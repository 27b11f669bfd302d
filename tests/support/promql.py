"""The queries of the dashboard and of the alerts, and what they ask of an exposition."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from promql_parser import AggregateExpr, BinaryExpr, VectorSelector

from tests.support.dashboard import Dashboard, sent
from tests.support.scraped import Scrape

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_PROMETHEUS = frozenset({"instance", "job"})
"""Labels that Prometheus adds to each series of a target."""
_UP = "up"
"""The series that Prometheus itself has of each target: 0 while it gets no answer."""
_ROUTER = "genserve_router_"
_CLOSED = frozenset({"phase", "process", "state", "step", "use", "versions_behind"})
"""Labels all of whose values are there from the beginning, whatever happens."""


def alerts() -> dict[str, str]:
    """The queries of the alerts, by their names."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels() -> dict[str, list[str]]:
    """The queries of the dashboard's panels, by their titles, as Grafana would send them."""
    dashboard = Dashboard.read()
    with_queries = [each for each in dashboard.panels if not each.is_row]
    found = {each.title: [target.query for target in each.targets] for each in with_queries}
    assert len(found) == len(with_queries), "two panels have the same title"
    found["annotations"] = list(dashboard.annotations.values())
    return {title: [sent(each, "1m", ".+") for each in queries] for title, queries in found.items()}


def queries() -> dict[str, str]:
    """All of them, by where they are."""
    of_panels = {f"{title} {number}": each for title, some in panels().items() for number, each in enumerate(some)}
    return {**alerts(), **of_panels}


def is_of_router(query: str) -> bool:
    """Whether a router answers it, and no daemon does."""
    return _ROUTER in query


def faults(query: str, scrape: Scrape) -> list[str]:
    """What a query asks for that the exposition does not have: series, labels, and values of labels."""
    parsed = promql_parser.parse(query)
    labels = scrape.labels()
    found: list[str] = []
    used: set[str] = set(OF_PROMETHEUS)
    for selector in _nodes(parsed, VectorSelector):
        name = selector.name or ""
        if name == _UP:
            continue
        if name not in labels:
            found.append(f"no series {name}")
            continue
        used |= labels[name]
        for matcher in selector.matchers.matchers:
            if matcher.name in OF_PROMETHEUS:
                continue
            if matcher.name not in labels[name]:
                found.append(f"{name} has no label {matcher.name}")
            elif matcher.name in _CLOSED:
                values = _values(scrape, name, matcher.name)
                asked = re.split(r"(?<!\\)\|", matcher.value)
                found += [f"{name} has no {matcher.name} {each}" for each in asked if not _any(each, values)]
    for name in _grouped(parsed):
        if name not in used:
            found.append(f"no series of it has the label {name}")
    return found


def _any(pattern: str, values: set[str]) -> bool:
    return any(re.fullmatch(pattern, value) for value in values)


def _values(scrape: Scrape, name: str, label: str) -> set[str]:
    return {value for found, given in scrape.samples if found == name for key, value in given if key == label}


def _grouped(parsed: Any) -> Iterator[str]:
    """The names of labels by which a query groups and joins."""
    for node in _nodes(parsed, AggregateExpr):
        if node.modifier is not None:
            yield from node.modifier.labels
    for node in _nodes(parsed, BinaryExpr):
        if node.modifier is not None and node.modifier.matching is not None:
            yield from node.modifier.matching.labels


def _nodes(node: Any, kind: type) -> Iterator[Any]:
    """All nodes of a kind in a parsed query."""
    if isinstance(node, kind):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from _nodes(child, kind)
    for child in getattr(node, "args", None) or ():
        yield from _nodes(child, kind)
