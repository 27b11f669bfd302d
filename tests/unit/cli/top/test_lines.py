"""Texts on the screen: as wide as said, whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.cli.top.lines import (
    Column,
    Span,
    Tone,
    bar,
    cells,
    clean,
    cut,
    fitted,
    justified,
    line,
    padded,
    plain,
    rule,
    sparkline,
    table,
    width_of,
)

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)


@given(PRINTABLE, st.integers(0, 50), st.booleans())
def test_a_padded_text_takes_exactly_its_cells(text: str, width: int, right: bool) -> None:
    """Also where one character takes two."""
    assert cells(padded(text, width, right=right)) == width
    assert cells(cut(text, width)) <= width


def test_a_text_that_is_cut_says_so() -> None:
    """And one that fits is left as it is."""
    assert [cut("abc", width) for width in (3, 2, 1, 0)] == ["abc", "a…", "…", ""]
    assert cut("模型", 3) == "模…"


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\u202eb", "a\x9bb"])
def test_what_a_terminal_would_obey_is_not_shown(text: str) -> None:
    """The holder of a lease is what anybody who can pause has written."""
    assert clean(text).startswith("a?") and clean(text).isprintable()
    assert clean("模型 é") == "模型 é"


@given(st.lists(PRINTABLE, max_size=5), st.integers(0, 60))
def test_a_line_is_never_wider_than_the_screen(texts: list[str], width: int) -> None:
    """However many spans it has."""
    spans = tuple(Span(text) for text in texts)
    assert width_of(fitted(spans, width)) <= width
    assert width_of(justified(spans, line("right"), width)) <= width


def test_two_ends_of_a_line_are_apart() -> None:
    """What is at the left gives way."""
    assert plain([justified(line("left"), line("right"), 12)]) == "left   right"
    assert plain([justified(line("leftmost"), line("right"), 12)]) == "left…  right"
    assert plain([rule("pushes", 14)]) == "── pushes ────"


def test_a_sparkline_shows_the_last_values_at_the_right() -> None:
    """The largest is a whole block, what is not known a gap; nothing is higher than the top."""
    assert sparkline([0.0, 1.0, None, 4.0, 8.0], 7, 8.0) == "  ▁▂ ▅█"
    assert sparkline([1.0, 2.0, 3.0], 2, 3.0) == "▆█"
    assert sparkline([9.0, float("nan"), -1.0], 3, 3.0) == "█▁▁"
    assert sparkline([0.0, 0.0], 2, 0.0) == "▁▁"
    assert sparkline([1.0, float("inf")], 2, float("inf")) == "▂█"
    assert sparkline([float("inf")], 1, 1.0) == "█"
    assert sparkline([1.0], 0, 1.0) == ""


def test_a_bar_is_full_only_at_the_end() -> None:
    """And neither longer than its width, nor shorter than nothing."""
    assert [bar(share, 4) for share in (-1.0, 0.0, 0.5, 0.999, 1.0, 2.0)] == [
        "░░░░",
        "░░░░",
        "██░░",
        "███░",
        "████",
        "████",
    ]


def test_an_encoding_without_blocks_gets_other_characters() -> None:
    """One for each, so that columns stay."""
    lines = [line("▁█░─…·●↑↓", Span(" x ", Tone.BAD))]
    assert plain(lines) == "▁█░─…·●↑↓ x"
    assert plain(lines, encoding="ascii") == "_#.-~.*^v x"
    assert plain(lines, encoding="no such encoding") == "_#.-~.*^v x"


COLUMNS = (Column("NAME", 4, 10), Column("N", 1, right=True), Column("MORE", 4, 8, extra=True))


def shown(width: int, name: str = "abcdef") -> list[str]:
    """A table of two rows at this width."""
    return plain(
        table(COLUMNS, [[Span(name), Span("12"), Span("remark")], [Span("b"), Span("3"), Span("")]], width)
    ).split("\n")


def test_columns_are_as_wide_as_their_cells() -> None:
    """With numbers at the right."""
    assert shown(40) == ["NAME    N MORE", "abcdef 12 remark", "b       3"]


def test_a_column_gives_way_when_there_is_no_room() -> None:
    """What is extra first, and then what is long."""
    assert shown(15) == ["NAME    N MORE", "abcdef 12 rem…", "b       3"]
    assert shown(13) == ["NAME    N", "abcdef 12", "b       3"]
    assert shown(8, "a" * 30) == ["NAME  N", "aaa… 12", "b     3"]
    assert shown(40, "a" * 30)[1] == "aaaaaaaaa… 12 remark"
