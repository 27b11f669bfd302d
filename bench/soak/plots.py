"""The curves of a soak as a PNG file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.soak.report import Report


def draw(report: Report, path: Path) -> None:
    """Memory, open files and threads, latencies, versions and requests over time."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    samples = report.samples
    minutes = [sample.at_s / 60 for sample in samples]
    figure, axes = pyplot.subplots(2, 3, figsize=(16.0, 8.0))
    names = list(dict.fromkeys(name for sample in samples for name in sample.private_bytes))
    for axis, title, unit, attribute in (
        (axes[0][0], "private memory, MB", 1e6, "private_bytes"),
        (axes[0][1], "open files", 1, "open_files"),
        (axes[0][2], "threads", 1, "threads"),
    ):
        axis.set_title(title)
        for name in names:
            axis.plot(minutes, [_of(getattr(sample, attribute), name, unit) for sample in samples], label=name)
        axis.legend(fontsize=7)
    axes[1][0].set_title("time of a request, s")
    for label, attribute in (("p50", "p50_s"), ("p99", "p99_s")):
        values: list[Any] = [getattr(sample, attribute) for sample in samples]
        axes[1][0].plot(minutes, [float("nan") if value is None else value for value in values], label=label)
    axes[1][0].legend(fontsize=7)
    axes[1][1].set_title("served version")
    axes[1][1].step(minutes, [sample.weight_version for sample in samples], where="post")
    axes[1][2].set_title("sequences")
    for attribute in ("running", "waiting"):
        axes[1][2].plot(minutes, [getattr(sample, attribute) for sample in samples], label=attribute)
    axes[1][2].legend(fontsize=7)
    for axis in axes.flat:
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _of(by_name: Mapping[str, int], name: str, unit: float) -> float:
    return by_name[name] / unit if name in by_name else float("nan")
