"""What a check came to."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """OK = as it should be; INFO = a figure that nothing is wrong or right about; WARN = it works, and something costs
    you; FAIL = it does not work."""

    OK = "OK"
    INFO = "INFO"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check. `finding` says what was seen; `advice` says what to do, "" when nothing is to be done; `figures` are
    for programs, with the unit in their names."""

    check: str
    level: Level
    finding: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "level": self.level.value, "figures": dict(self.figures)}


@dataclass(frozen=True, slots=True)
class Section:
    """Checks under one heading."""

    title: str
    verdicts: tuple[Verdict, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"title": self.title, "verdicts": [verdict.as_dict() for verdict in self.verdicts]}


def ok(check: str, finding: str, **figures: Any) -> Verdict:
    """Nothing is to be done."""
    return Verdict(check, Level.OK, finding, "", figures)


def info(check: str, finding: str, **figures: Any) -> Verdict:
    """Nothing was checked."""
    return Verdict(check, Level.INFO, finding, "", figures)


def warn(check: str, finding: str, advice: str, **figures: Any) -> Verdict:
    """It works, and something costs you."""
    return Verdict(check, Level.WARN, finding, advice, figures)


def fail(check: str, finding: str, advice: str, **figures: Any) -> Verdict:
    """It does not work."""
    return Verdict(check, Level.FAIL, finding, advice, figures)


def exit_status(sections: Iterable[Section]) -> int:
    """1 if anything fails, else 0."""
    failed = any(verdict.level is Level.FAIL for section in sections for verdict in section.verdicts)
    return 1 if failed else 0
