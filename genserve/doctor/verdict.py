"""The result of a check."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """OK = as it should be; INFO = a figure without a judgement; WARN = it works, at a cost; FAIL = it does not
    work."""

    OK = "OK"
    INFO = "INFO"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check. `finding` says what was seen. `advice` says what to do, "" if nothing. `figures` are for programs,
    with the unit in their names."""

    check: str
    level: Level
    finding: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The values for JSON."""
        return {**asdict(self), "level": self.level.value, "figures": dict(self.figures)}


@dataclass(frozen=True, slots=True)
class Section:
    """The checks under one heading."""

    title: str
    verdicts: tuple[Verdict, ...]

    def as_dict(self) -> dict[str, Any]:
        """The values for JSON."""
        return {"title": self.title, "verdicts": [verdict.as_dict() for verdict in self.verdicts]}


def ok(check: str, finding: str, **figures: Any) -> Verdict:
    """A check that passed."""
    return Verdict(check, Level.OK, finding, "", figures)


def info(check: str, finding: str, **figures: Any) -> Verdict:
    """A figure that was not judged."""
    return Verdict(check, Level.INFO, finding, "", figures)


def warn(check: str, finding: str, advice: str, **figures: Any) -> Verdict:
    """A check that works at a cost."""
    return Verdict(check, Level.WARN, finding, advice, figures)


def fail(check: str, finding: str, advice: str, **figures: Any) -> Verdict:
    """A check that failed."""
    return Verdict(check, Level.FAIL, finding, advice, figures)


def exit_status(sections: Iterable[Section]) -> int:
    """1 if any check failed, else 0."""
    failed = any(verdict.level is Level.FAIL for section in sections for verdict in section.verdicts)
    return 1 if failed else 0
