"""The series that docs/internals/series.md names, in its tables."""

import re
from pathlib import Path

from tests.support.scraped import Scrape

_PAGE = Path(__file__).parents[2] / "docs" / "internals" / "series.md"
_ROW = re.compile(r"^\| `([a-z0-9_:]+)` \| (gauge|counter|histogram) \| (.*?) \| .+ \|$", re.MULTILINE)
NOT_LISTED = "see vLLM"
"""Instead of labels that are settings of vLLM."""


def documented(prefix: str = "") -> dict[str, tuple[str, frozenset[str]]]:
    """By name: the type, and the labels. Those of vLLM have two more, as the page says."""
    found = {}
    for name, kind, cell in _ROW.findall(_PAGE.read_text()):
        labels = set(re.findall(r"`(\w+)`", cell))
        if name.startswith("vllm:") and "model_name" not in labels:
            labels |= {"engine", "model_name"}
        if name.startswith(prefix):
            assert name not in found, f"{name} is there twice"
            found[name] = kind, frozenset(labels if cell != NOT_LISTED else {NOT_LISTED})
    return found


def shown(scrape: Scrape) -> dict[str, tuple[str, frozenset[str]]]:
    """The same of an exposition; the labels of a series without samples are not known, and empty."""
    labels = scrape.labels()
    found = {}
    for name, kind in scrape.types.items():
        series = f"{name}_total" if kind == "counter" else name
        of_samples = labels.get(f"{series}_count" if kind == "histogram" else series, set())
        found[series] = kind, frozenset(of_samples)
    return found


def differences(scrape: Scrape, prefix: str = "") -> dict[str, str]:
    """Between the page and an exposition, in the series whose names begin so."""
    said, found = documented(prefix), {name: each for name, each in shown(scrape).items() if name.startswith(prefix)}
    wrong = {name: "is not on the page" for name in found.keys() - said.keys()}
    wrong |= {name: "is not shown" for name in said.keys() - found.keys()}
    for name in found.keys() & said.keys():
        if NOT_LISTED not in said[name][1] and said[name] != found[name]:
            wrong[name] = f"is {found[name]}, and on the page {said[name]}"
    return wrong
