"""Rows of cells in columns. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from genserve.cli.top.lines import Line, Span, Tone, cells, padded


@dataclass(frozen=True, slots=True)
class Column:
    """At least `least` cells wide, or what it needs, and at most `most`; 0 = as wide as it needs. `right`: for numbers,
    which are not cut. `extra`: shown only if all others have what they want and there is room for its least width."""

    title: str
    least: int
    most: int = 0
    right: bool = False
    extra: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span]], width: int) -> list[Line]:
    """The titles, and one line for each row. Columns get what they want, in order, as long as there is room."""
    widths = _widths(columns, rows, width)
    titles: Line = tuple(Span(column.title, Tone.DIM) for column in columns)
    return [_row(columns, each, widths) for each in (titles, *rows)]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Span]], width: int) -> list[int]:
    wanted = []
    for place, column in enumerate(columns):
        needed = max(cells(column.title), *(cells(row[place].text) for row in rows))
        wanted.append(min(needed, column.most) if column.most else needed)
    widths = [
        0 if column.extra else want if column.right else min(column.least, want)
        for want, column in zip(wanted, columns, strict=True)
    ]
    left = width - sum(each + 1 for each, column in zip(widths, columns, strict=True) if not column.extra)
    for place, column in enumerate(columns):
        if not column.extra:
            more = min(max(0, left), wanted[place] - widths[place])
            widths[place] += more
            left -= more
    for place, column in enumerate(columns):
        given = min(wanted[place], left - 1)
        if column.extra and given >= max(1, min(column.least, wanted[place])):
            widths[place] = given
            left -= given + 1
    return widths


def _row(columns: Sequence[Column], row: Sequence[Span], widths: Sequence[int]) -> Line:
    spans: list[Span] = []
    for column, span, width in zip(columns, row, widths, strict=True):
        if width > 0:
            spans.append(Span(padded(span.text, width, right=column.right) + " ", span.tone))
    return tuple(spans)
