"""The results of checks, and the report of them: lines of text, or JSON for a bug report."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

_WIDTH: Final = 116
_NAME_WIDTH: Final = 26


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


def section_lines(section: Section) -> list[str]:
    """A heading, and each verdict with its advice below it."""
    lines = [section.title]
    for verdict in section.verdicts:
        head = f"  {verdict.level.value:<4}  {verdict.check:<{_NAME_WIDTH}}  "
        indent = " " * len(head)
        lines += textwrap.wrap(verdict.finding, _WIDTH, initial_indent=head, subsequent_indent=indent) or [
            head.rstrip()
        ]
        if verdict.advice:
            lines += textwrap.wrap(f"-> {verdict.advice}", _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines


def summary_line(sections: Sequence[Section], elapsed_s: float) -> str:
    """The number of checks by level."""
    levels = [verdict.level for section in sections for verdict in section.verdicts]
    counts = ", ".join(f"{levels.count(level)} {level.value}" for level in Level if level is not Level.INFO)
    return f"{counts} in {elapsed_s:.0f} s"


def to_json(sections: Sequence[Section], facts: Mapping[str, Any], elapsed_s: float) -> str:
    """Every verdict with its figures, and the facts of the machine."""
    document = {
        "ok": exit_status(sections) == 0,
        "elapsed_s": round(elapsed_s, 1),
        "sections": [section.as_dict() for section in sections],
        "facts": dict(facts),
    }
    return json.dumps(document, indent=2)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, as a line."""

    name: str
    is_ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.is_ok else 'failed':<7} {self.name:<10} {' '.join(self.text.split())}"
