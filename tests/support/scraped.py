"""Answers of a metrics port as samples by name and labels."""

import asyncio
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.support.known_secrets import check_told

_WAIT_S = 60.0


@dataclass(frozen=True)
class Scrape:
    """One answer. `samples`: by name and labels; `types` and `helps`: of families, by their names."""

    text: str
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    types: Mapping[str, str]
    helps: Mapping[str, str]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, whatever others they have; 0 if there is none."""
        asked = set(labels.items())
        return sum(value for (found, given), value in self.samples.items() if found == name and asked <= given)

    def labels(self) -> dict[str, set[str]]:
        """The names of the labels of each series."""
        names: dict[str, set[str]] = {}
        for name, given in self.samples:
            names.setdefault(name, set()).update(label for label, _ in given)
        return names


def parsed(text: str) -> Scrape:
    """A text of Prometheus's format. Raises AssertionError if a secret is in it."""
    check_told("the metrics", text)
    families = list(text_string_to_metric_families(text))
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }
    types, helps = ({each.name: getattr(each, field) for each in families} for field in ("type", "documentation"))
    return Scrape(text, samples, types, helps)


def scrape(url: str) -> Scrape:
    """One scrape. The answer may be up to a second old."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return parsed(answer.read().decode())


async def scraped_until(url: str, holds: Callable[[Scrape], bool]) -> Scrape:
    """Scrapes until `holds` is true: an answer may be a second old, and a call counts when its last byte is sent."""
    async with asyncio.timeout(_WAIT_S):
        while not holds(found := await asyncio.to_thread(scrape, url)):
            await asyncio.sleep(0.1)
    return found
