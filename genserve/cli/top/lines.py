"""Lines of the screen: text in tones, as many cells wide as a terminal shows. Pure.

What a daemon tells may come from anybody who can call it. Characters that a terminal would obey are replaced.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = str.maketrans("▁▂▃▄▅▆▇█░─…·●↑↓", "_..--==#.-~.*^v")


class Tone(Enum):
    """The meaning of a text for the reader; the screen gives it a color."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    TITLE = "title"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one tone."""

    text: str
    tone: Tone = Tone.PLAIN


Line = tuple[Span, ...]


def line(*parts: str | Span) -> Line:
    """A line of spans; a text alone is PLAIN."""
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def clean(text: str) -> str:
    """The text without characters that a terminal would obey: line ends, escapes, changes of direction."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def cells(text: str) -> int:
    """How many cells of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def cut(text: str, width: int) -> str:
    """At most so many cells of the text, with a … if something is missing."""
    if cells(text) <= width:
        return text
    kept, left = "", width - 1
    for each in text:
        left -= cells(each)
        if left < 0:
            break
        kept += each
    return f"{kept}…" if width > 0 else ""


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Exactly so many cells: cut, or filled with blanks after it, or before it (`right`)."""
    shown = cut(text, width)
    blanks = " " * (width - cells(shown))
    return blanks + shown if right else shown + blanks


def width_of(spans: Line) -> int:
    """How many cells a line takes."""
    return sum(cells(span.text) for span in spans)


def fitted(spans: Line, width: int) -> Line:
    """At most so many cells of a line."""
    if width_of(spans) <= width:
        return spans
    kept: list[Span] = []
    for span in spans:
        left = width - width_of(tuple(kept))
        kept.append(Span(cut(span.text, left), span.tone))
        if cells(span.text) > left:
            break
    return tuple(kept)


def justified(left: Line, right: Line, width: int) -> Line:
    """Both in one line of so many cells; of the left one only as much as there is room for."""
    room = max(0, width - width_of(right) - 2)
    shown = fitted(left, room)
    return fitted((*shown, Span(" " * (width - width_of(shown) - width_of(right))), *right), width)


def rule(title: str, width: int) -> Line:
    """`── title ─────`"""
    begin = f"── {title} "
    return (Span(cut(begin + "─" * max(0, width - cells(begin)), width), Tone.TITLE),)


def sparkline(values: Sequence[float | None], width: int, top: float) -> str:
    """The last values, one cell each, the newest at the right; `top` is a whole block. None is a gap."""
    shown = values[-width:] if width > 0 else ()
    blocks = [" " if value is None else _BLOCKS[_level(value, top)] for value in shown]
    return "".join(blocks).rjust(max(0, width))


def _level(value: float, top: float) -> int:
    if not value > 0 or not top > 0:  # NaN, too
        return 0
    share = min(1.0, value / top)  # 1 for infinities, which a daemon may tell
    return min(len(_BLOCKS) - 1, max(1, int(share * len(_BLOCKS))))


def bar(share: float, width: int) -> str:
    """`███░░`, rounded down: full only if the share is 1."""
    full = int(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def plain(lines: Iterable[Line], *, encoding: str = "utf-8") -> str:
    """Lines as text without tones, with other characters if the encoding lacks those for drawing."""
    text = "\n".join("".join(span.text for span in spans).rstrip() for spans in lines)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII)
    return text


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
