"""Scenarios: files that say what to do and what must come out."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "scenarios"
_NAME = re.compile(r"\$\{(\w+)\}")
_FIELDS = {"title", "steps", "daemon", "ca", "token", "link", "after", "optional"}
_LINKS = {
    "cancelled_calls",
    "cut_at_bytes",
    "cut_pull_at_bytes",
    "corrupt_chunk",
    "corrupt_pulled_chunk",
    "deadline_ms",
    "ended_pull_chunks",
    "padded_bytes",
    "push_at_tokens",
    "push_streams",
    "refused_calls",
    "taken_over_at_bytes",
    "taken_over_at_end",
    "unknown_enums",
}
_OF_CUTS = {"cut_at_bytes": {"refuse_ms", "forget"}, "cut_pull_at_bytes": {"refuse_ms", "serve"}}
_OF_RUNNER = {"expect", "may_differ"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file. `link` is what happens to the connection, `after` what the runner must find in the end; `optional`: a
    driver may lack a step."""

    name: str
    title: str
    steps: list[dict[str, Any]]
    daemon: str = "open"
    ca: str = ""
    token: str = ""
    link: dict[str, int] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    optional: bool = False

    @classmethod
    def load(cls, path: Path) -> "Scenario":
        """Raises ValueError for what does not exist, and for a step of which nothing is expected."""
        fields = json.loads(path.read_text())
        links = fields.get("link", {}).keys()
        of_cuts = next((also for cut, also in _OF_CUTS.items() if cut in links), set())
        unknown = [*fields.keys() - _FIELDS, *links - _LINKS - of_cuts]
        if unknown or fields.get("daemon", "open") not in ("open", "secured"):
            raise ValueError(f"{path.name}: unknown: {', '.join(sorted(unknown)) or fields['daemon']}")
        if not fields["steps"] or len(links - of_cuts) > 1:
            raise ValueError(f"{path.name}: there must be a step, and no more than one link")
        if missing := [step["do"] for step in fields["steps"] if "expect" not in step]:
            raise ValueError(f"{path.name}: nothing is expected of {', '.join(missing)}")
        if fields.get("daemon") == "secured" and fields.keys() & {"after", "link"}:
            raise ValueError(f"{path.name}: after and link are of the open daemon")
        return cls(path.stem, **fields)

    def for_driver(self, names: Mapping[str, str], version: int) -> list[dict[str, Any]]:
        """The steps as a driver gets them: without what is expected, and with values in place of names."""
        steps = [{name: value for name, value in step.items() if name not in _OF_RUNNER} for step in self.steps]
        return [filled(step, names, version) for step in steps]


def all_scenarios() -> list[Scenario]:
    """Those of this repository, by name."""
    return [Scenario.load(path) for path in sorted(DIRECTORY.glob("*.json"))]


def filled(value: Any, names: Mapping[str, str], version: int) -> Any:
    """`value` with what `${name}` and `{"$version": n}` stand for. `version` is the one that is served."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: names[found[1]], value)
    if isinstance(value, list):
        return [filled(each, names, version) for each in value]
    if isinstance(value, dict):
        if value.keys() == {"$version"}:
            return version + value["$version"]
        return {key: filled(each, names, version) for key, each in value.items()}
    return value
