"""The whole screen as lines: which part gets how many rows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from genserve.cli.top import sections
from genserve.cli.top.lines import Line, Span, Tone, clean, fitted, line, rule
from genserve.cli.top.screen import LinkState, Screen

_UNBOUNDED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """A titled part. `least`: rows that it gets first. `focus`: a row that is shown even if not all are; the first
    `num_fixed` rows are always shown."""

    title: str
    rows: Sequence[Line]
    least: int
    num_fixed: int = 0
    focus: int = 0


def frame(screen: Screen, width: int, height: int | None, now_s: float, *, keys: bool = True) -> list[Line]:
    """At most `height` lines of at most `width` cells; None = as many as there are. The last one shows the keys."""
    top = [*sections.header(screen, width, now_s), *sections.load(screen, width)]
    bottom = sections.keys(screen)[-height if height is not None else None :] if keys else []
    parts = [
        Part("pushes", sections.pushes(screen, width, now_s), 3, 1 if screen.transfers.shown else 0),
        Part("pauses", sections.pauses(screen, width, now_s), 2),
    ]
    if screen.is_router or screen.replicas_problem:
        rows = sections.replicas(screen, width)
        place = screen.addresses.index(screen.selected) + 1 if screen.addresses else 0
        parts.append(Part("replicas", rows, 4, 1 if len(rows) > 1 else 0, place))
    if notes := sections.notes(screen, now_s):
        parts.append(Part("notes", notes, 1))
    room = _UNBOUNDED if height is None else height - len(top) - len(bottom)
    middle = _stacked(parts, width, room)
    if screen.link.state is LinkState.LOST:
        top[2:], middle = _faded(top[2:]), _faded(middle)
    if height is not None:
        middle = middle[: max(0, room)]
        middle += [()] * (height - len(top) - len(bottom) - len(middle))
        top = top[: max(0, height - len(bottom))]
    return [
        tuple(Span(clean(span.text), span.tone) for span in fitted(each, width)) for each in (*top, *middle, *bottom)
    ]


def shared(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """How many rows each part gets: its least ones first, and then one more each in turn, until all have what they want
    or no room is left."""
    given = [0] * len(wanted)
    for limits in (least, wanted):
        changed = True
        while changed:
            changed = False
            for place, limit in enumerate(limits):
                if given[place] < min(limit, wanted[place]) and sum(given) < room:
                    given[place] += 1
                    changed = True
    return given


def window(part: Part, count: int) -> list[Line]:
    """So many of the rows of a part, around its focus; the last one says how many are missing."""
    if len(part.rows) <= count:
        return list(part.rows)
    if count <= part.num_fixed:
        return list(part.rows[:count])
    fixed, rows = part.rows[: part.num_fixed], part.rows[part.num_fixed :]
    count -= part.num_fixed + 1
    place = part.focus - part.num_fixed
    begin = min(max(0, place - count + 1), max(0, len(rows) - count))
    told = line(Span(f"… {len(rows) - count} more", Tone.DIM))
    return [*fixed, *rows[begin : begin + count], told]


def _stacked(parts: Sequence[Part], width: int, room: int) -> list[Line]:
    given = shared([len(part.rows) for part in parts], [part.least for part in parts], room - len(parts))
    lines: list[Line] = []
    for part, count in zip(parts, given, strict=True):
        lines += [rule(part.title, width), *window(part, count)]
    return lines


def _faded(lines: Sequence[Line]) -> list[Line]:
    """The last report before the daemon was lost."""
    return [tuple(Span(span.text, Tone.DIM) for span in each) for each in lines]
