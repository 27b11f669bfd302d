"""The report: lines of text, or JSON for a bug report."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from genserve.doctor.verdict import Level, Section, exit_status

_WIDTH: Final = 116
_NAME_WIDTH: Final = 26


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
