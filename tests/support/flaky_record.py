"""tests/flaky.tsv: the tests that failed and then passed alone, one line each.

`fixed` is empty until somebody has fixed the cause: then it says how, or in which commit.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

MAX_OPEN: Final = 10
MIN_BETWEEN: Final = timedelta(days=14)
"""A test may be listed twice within this time only if it was fixed in between."""


@dataclass(frozen=True, slots=True)
class Row:
    """A test that was flaky. `standstill_s`: the longest time in which its process did not get to run, in seconds."""

    when: date
    commit: str
    test: str
    said: str
    standstill_s: float
    fixed: str = ""

    def line(self) -> str:
        """The row as a line of the file."""
        cells = (self.when.isoformat(), self.commit, self.test, self.said, f"{self.standstill_s:.2f}", self.fixed)
        return "\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in cells)

    @classmethod
    def parse(cls, line: str) -> Self:
        """The row of a line. Raises ValueError for a line of another form."""
        when, commit, test, said, standstill_s, fixed = line.split("\t")
        return cls(date.fromisoformat(when), commit, test, said, float(standstill_s), fixed.strip())


HEADER: Final = "\t".join(field.name for field in fields(Row))


def append(path: Path, row: Row) -> None:
    """Adds a row. The file begins with the names of the columns."""
    if not path.exists():
        path.write_text(HEADER + "\n")
    with path.open("a") as file:
        file.write(row.line() + "\n")


def read(path: Path) -> list[Row]:
    """All rows, in the order of the file. Raises ValueError for a line of another form."""
    header, *lines = path.read_text().splitlines()
    if header != HEADER:
        raise ValueError(f"{path} does not begin with the columns {HEADER!r}")
    return [Row.parse(line) for line in lines]


def faults(rows: Iterable[Row]) -> list[str]:
    """What must not stand in the record."""
    rows = sorted(rows, key=lambda row: row.when)
    found = []
    num_open = sum(not row.fixed for row in rows)
    if num_open > MAX_OPEN:
        found.append(f"{num_open} tests are flaky and not fixed, more than {MAX_OPEN}")
    by_test: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_test[row.test.partition("[")[0]].append(row)  # with whichever parameters
    for test, listed in by_test.items():
        for earlier, later in pairwise(listed):
            is_one_run = (earlier.when, earlier.commit) == (later.when, later.commit)
            if not earlier.fixed and later.when - earlier.when < MIN_BETWEEN and not is_one_run:
                found.append(f"{test} is listed twice, and was not fixed in between")
    return found
