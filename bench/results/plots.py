"""Growth curves of the results as PNG files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.results.result import Result

_WIDTH, _HEIGHT = 5.2, 4.0  # inches, of one panel
_COLUMNS = 3
_NUM_COLORS = 20
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms")


def draw(result: Result, directory: Path) -> Path:
    """Draws NAME.png."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    panels: Callable[[Result], list[tuple[str, str, str, Curves]]] = PANELS[result.name]
    drawn = panels(result)
    num_columns = min(len(drawn), _COLUMNS)
    num_rows = -(-len(drawn) // num_columns)
    size = (_WIDTH * num_columns, _HEIGHT * num_rows)
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    # One colour for a name in every panel: a panel need not have all of them.
    names = list(dict.fromkeys(name for _, _, _, curves in drawn for name in curves))
    colors = {name: matplotlib.colormaps["tab20"](number % _NUM_COLORS) for number, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axis, (title, x_label, y_label, curves) in zip(axes.flat, drawn, strict=False):
        if result.name in _BARS:
            handles |= _bars(axis, curves, colors)
        else:
            handles |= _lines(axis, curves, colors, logarithmic=result.name not in _LINEAR)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(visible=True, which="both", alpha=0.25)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    figure.legend(handles.values(), handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    path = directory / f"{result.name}.png"
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return path


Curves = dict[str, tuple[list[float], list[float]]]


def _lines(axis: Any, curves: Curves, colors: Mapping[str, Any], *, logarithmic: bool) -> dict[str, Any]:
    handles = {}
    for name, (xs, ys) in curves.items():
        dashes = "--" if name.endswith("_final") else ":" if name.endswith("_stub") else "-"
        # There are twenty colours: the names after them have another mark.
        marker = "o" if list(colors).index(name) < _NUM_COLORS else "s"
        (handles[name],) = axis.plot(xs, ys, dashes, color=colors[name], marker=marker, markersize=3, linewidth=1.2)
    if logarithmic:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    return handles


def _bars(axis: Any, curves: Curves, colors: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of bars: one group an x, one bar a curve."""
    handles = {}
    width = 0.8 / len(curves)
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        handles[name] = axis.bar([x + number * width for x in xs], ys, width, color=colors[name])
    axis.set_xticks([])  # the axis' label says which group is which
    axis.axhline(1.0, color="black", linewidth=0.8)
    return handles


def _curves(medians: Mapping[str, Mapping[str, Mapping[str, float]]], xs: Mapping[str, float], figure: str) -> Curves:
    curves: Curves = {}
    for key, by_peer in medians.items():
        for peer, figures in by_peer.items():
            if figures.get(figure, 0) > 0:
                points = curves.setdefault(peer, ([], []))
                points[0].append(xs[key])
                points[1].append(figures[figure])
    return curves


def _generate(result: Result) -> list[tuple[str, str, str, Curves]]:
    tokens = {key: each for key, each in result.medians.items() if key.isdigit()}  # of token ids alone
    xs = {key: float(key) for key in tokens}
    panels = [("tokens_per_s", "tokens/s"), *((name, "ms") for name in _LATENCIES)]
    panels += [(name, "µs a token") for name in ("cpu_client_us", "cpu_server_us")]
    drawn = [(name, "requests at once", unit, _curves(tokens, xs, name)) for name, unit in panels]
    return [panel for panel in drawn if panel[3]]


def _serving(result: Result) -> list[tuple[str, str, str, Curves]]:
    by_pace: dict[str, dict[str, Any]] = {}
    for key, by_peer in result.medians.items():
        by_pace.setdefault(key.partition(", ")[2], {})[key] = by_peer
    return [
        (pace, "streams", "tokens/s of one core", _curves(rows, {key: float(key.split()[0]) for key in rows}, figure))
        for figure in ("tokens_per_core_s",)
        for pace, rows in by_pace.items()
    ]


def _by_size(*figures: tuple[str, str]) -> Callable[[Result], list[tuple[str, str, str, Curves]]]:
    def panels(result: Result) -> list[tuple[str, str, str, Curves]]:
        xs = {key: size_bytes / 1e6 for key, size_bytes in result.notes["bytes"].items()}
        return [(name, "model, MB", unit, _curves(result.medians, xs, name)) for name, unit in figures]

    return panels


def _cycle(result: Result) -> list[tuple[str, str, str, Curves]]:
    figures = (
        ("share", "share of no pushes"),
        ("lost_s_per_push", "s lost a push"),
        ("first_new_s", "s to the first new token"),
        ("longest_wait_s", "s, longest wait"),
    )
    panels = []
    for num_streams in result.settings["concurrency"]:
        prefix = f"{num_streams} streams, "
        by_interval = {key: each for key, each in result.medians.items() if key.startswith(prefix)}
        xs = {key: float(key.removeprefix(prefix).removesuffix(" s")) for key in by_interval}
        for name, unit in figures:
            panels.append((f"{num_streams} streams: {unit}", "s between pushes", unit, _curves(by_interval, xs, name)))
    return panels


def _interference(result: Result) -> list[tuple[str, str, str, Curves]]:
    panels = []
    for name in ("inter_token_p50_ms", "inter_token_p99_ms"):
        curves: Curves = {}
        for number, by_phase in enumerate(result.ratios.values()):
            for phase, ratios in by_phase.items():
                points = curves.setdefault(phase, ([], []))
                points[0].append(float(number))
                points[1].append(ratios[name])
        panels.append((f"{name}, ratio to undisturbed", ", ".join(result.ratios), "ratio", curves))
    return panels


def _memory(result: Result) -> list[tuple[str, str, str, Curves]]:
    curves = {}
    for key, samples in result.rounds.items():
        for name in ("anonymous", "shared", "total"):
            ys = [sample[name] / 1e6 for sample in samples["after_push"]]
            curves[f"{key} {name}"] = ([float(i + 1) for i in range(len(ys))], ys)
    return [("host memory after each push", "pushes", "MB", curves)]


_BARS, _LINEAR = ("interference",), ("cycle", "memory")
PANELS: dict[str, Callable[[Result], list[tuple[str, str, str, Curves]]]] = {
    "generate": _generate,
    "serving": _serving,
    "cycle": _cycle,
    "push": _by_size(("gb_per_s", "GB/s"), ("seconds", "s")),
    "pause": _by_size(("paused_s", "s paused"), ("total_s", "s until served")),
    "interference": _interference,
    "memory": _memory,
}
