"""Cells of tables: a median, what it is of the baseline's, and the spread over the rounds."""

from collections.abc import Sequence

from bench.results.result import Result


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def value(result: Result, key: str, peer: str, figure: str, *, scale: float = 1.0, digits: int = 1) -> str:
    """`27.2 (24.1–31.0)`: the median, and the lowest and the highest of a round; empty if there is no such figure."""
    figures = result.medians[key].get(peer, {})
    if figure not in figures:
        return ""
    low, high = (f"{scale * each:z,.{digits}f}" for each in result.range_of(key, peer, figure))
    return f"{scale * figures[figure]:z,.{digits}f} ({low}–{high})"


def with_ratio(
    result: Result,
    key: str,
    peer: str,
    figure: str,
    ratio: float | None,
    baseline: str,
    *,
    scale: float = 1.0,
    digits: int = 1,
) -> str:
    """`1.87 (0.72; 0.65–0.80)`: the median, what it is of the baseline's, and the lowest and the highest of that in a
    round; only the median if there is no baseline, empty if there is no such figure."""
    if figure not in (figures := result.medians[key].get(peer, {})):
        return ""
    shown = f"{scale * figures[figure]:z,.{digits}f}"
    if ratio is None:
        return shown
    if peer == baseline:
        return f"{shown} (1)"
    low, high = result.range_of_ratio(key, peer, figure, baseline)
    return f"{shown} ({ratio:.2f}; {low:.2f}–{high:.2f})"
