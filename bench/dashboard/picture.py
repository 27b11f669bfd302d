"""The panels as a PNG file: each in its place, with its title, its unit and its legend, as near to Grafana as
matplotlib comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from bench.dashboard.prometheus import Series
from tests.support.dashboard import NUM_COLUMNS, Dashboard, Panel, legend, lines, scale

_COLUMN, _ROW, _GAP, _HEAD = 58.0, 28.0, 6.0, 44.0
"""Pixels: of a column and of a row of the grid, between panels, and above all of them."""
_TITLE, _LINE, _LEFT, _RIGHT, _TIMES = 22.0, 13.0, 62.0, 12.0, 17.0
"""Pixels of a panel: its title, a line of its legend, its values, its right edge and its times."""
_SWATCH, _BETWEEN = 18.0, 12.0
_DPI = 100
_NUM_COLORS = 192
_COLORS = (
    *("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300"),
    *("#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477"),
)
"""The beginning of Grafana's classic palette."""
_GROUND, _PANEL, _EDGE, _TEXT, _FAINT = "#f4f5f5", "#ffffff", "#e0e1e3", "#24292e", "#70757a"


@dataclass(frozen=True)
class Span:
    """From when to when, in Unix seconds, and the time between two points."""

    start_s: int
    end_s: int
    step_s: int

    @property
    def times(self) -> list[float]:
        """Of all points."""
        return [float(each) for each in range(self.start_s, self.end_s + 1, self.step_s)]


def draw(
    dashboard: Dashboard, answers: Mapping[str, Sequence[Sequence[Series]]], span: Span, about: str, path: Path
) -> None:
    """`answers`: by the title of a panel, one for each of its targets. `about` stands above the panels."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot
    from PIL import Image

    width, height = NUM_COLUMNS * _COLUMN + _GAP, dashboard.height * _ROW + _HEAD + _GAP
    figure = pyplot.figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_GROUND)
    canvas = _Canvas(figure, width, height)
    canvas.text(_GAP + 4, 26, dashboard.title, 13, weight="bold")
    canvas.text(width - _GAP - 4, 25, about, 8.5, color=_FAINT, align="right")
    for panel in dashboard.panels:
        left, top = panel.place.x * _COLUMN + _GAP, _HEAD + panel.place.y * _ROW
        if panel.is_row:
            canvas.text(left + 4, top + 18, panel.title, 10, weight="bold")
        else:
            size = (panel.place.width * _COLUMN - _GAP, panel.place.height * _ROW - _GAP)
            _draw_panel(canvas, panel, answers[panel.title], span, (left, top), size)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=_DPI, facecolor=_GROUND)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(_NUM_COLORS).save(path, optimize=True)  # a third of the size


class _Canvas:
    """A figure, in pixels from its upper left corner."""

    def __init__(self, figure: Any, width: float, height: float) -> None:
        self.figure, self.width, self.height = figure, width, height

    def text(self, x: float, y: float, text: str, size: float, **options: Any) -> None:
        options["horizontalalignment"] = options.pop("align", "left")
        options = {"color": _TEXT, "verticalalignment": "baseline", "parse_math": False, **options}
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, **options)

    def width_of(self, text: str, size: float) -> float:
        from matplotlib.font_manager import FontProperties

        renderer = self.figure.canvas.get_renderer()
        return float(renderer.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0])

    def box(self, x: float, y: float, width: float, height: float, color: str, edge: str | None = None) -> None:
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + height) / self.height)
        size = (width / self.width, height / self.height)
        transform = self.figure.transFigure
        drawn = Rectangle(
            corner, *size, transform=transform, facecolor=color, edgecolor=edge or color, linewidth=0.8, zorder=-1
        )
        self.figure.add_artist(drawn)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        place = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place, facecolor="none")


def _draw_panel(
    canvas: _Canvas,
    panel: Panel,
    answers: Sequence[Sequence[Series]],
    span: Span,
    corner: tuple[float, float],
    size: tuple[float, float],
) -> None:
    (left, top), (width, height) = corner, size
    canvas.box(left, top, width, height, _PANEL, _EDGE)
    canvas.text(left + 8, top + 16, panel.title, 8.5, weight="bold")
    named = [
        (legend(target.legend, series.labels), series)
        for target, some in zip(panel.targets, answers, strict=True)
        for series in some
    ]
    widths = [_SWATCH + canvas.width_of(name, 7) + _BETWEEN for name, _ in named]
    placed = lines(widths, width - 16)
    bottom = top + height - 6 - _LINE * len(placed)
    for number, line in enumerate(placed):
        x, y = left + 10, bottom + _LINE * (number + 1) - 3
        for entry in line:
            canvas.box(x, y - 4, 12, 2.5, _color(entry))
            canvas.text(x + _SWATCH, y, named[entry][0], 7)
            x += widths[entry]
    axes = canvas.axes(left + _LEFT, top + _TITLE + 4, width - _LEFT - _RIGHT, bottom - top - _TITLE - _TIMES - 6)
    _draw_series(axes, panel, [series for _, series in named], span)


def _draw_series(axes: Any, panel: Panel, drawn: Sequence[Series], span: Span) -> None:
    import numpy

    rows = [numpy.array([series.values.get(at, numpy.nan) for at in span.times]) for series in drawn]
    tops = numpy.cumsum([numpy.nan_to_num(row) for row in rows], axis=0) if panel.is_stacked else numpy.array(rows)
    factor, unit = scale(panel.unit, float(numpy.nanmax(tops)))
    times = numpy.array(span.times)
    for number, row in enumerate(rows):
        known = numpy.isfinite(row)
        top = numpy.where(known, tops[number], numpy.nan) / factor
        below = tops[number - 1] / factor if panel.is_stacked and number else numpy.zeros_like(times)
        axes.plot(times, top, color=_color(number), linewidth=1.1)
        alone = known & ~numpy.append(known[1:], False) & ~numpy.insert(known[:-1], 0, False)
        axes.plot(times[alone], top[alone], ".", color=_color(number), markersize=2.5)
        if panel.fill:
            axes.fill_between(times, below, top, color=_color(number), alpha=panel.fill, linewidth=0)
    _draw_axes(axes, panel, span, factor, unit)


def _draw_axes(axes: Any, panel: Panel, span: Span, factor: float, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(span.start_s, span.end_s)
    ends = (panel.least, panel.largest)
    least, largest = (None if each is None else each / factor for each in ends)
    _, highest = axes.get_ylim()
    axes.set_ylim(least, largest if largest is not None else max(highest * 1.05, 1e-9))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    axes.set_xticks(_ticks(span))
    axes.xaxis.set_major_formatter(lambda value, _: datetime.fromtimestamp(value, UTC).strftime("%H:%M:%S"))
    axes.tick_params(labelsize=7, length=0, colors=_FAINT)
    axes.grid(visible=True, color=_EDGE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _ticks(span: Span) -> list[int]:
    """The times that are written: round ones, not so near to an edge that they would stand in another panel."""
    seconds = span.end_s - span.start_s
    apart = next((each for each in (10, 15, 30, 60, 120, 300) if seconds / each <= 4), 600)
    edge = seconds // 10
    return [at for at in range(span.start_s + edge, span.end_s - edge) if at % apart == 0]


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]
