"""A training run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_PANELS = {
    "reward": ["reward"],
    "staleness of tokens,\nversions": ["staleness", "max_staleness"],
    "generation stood still\nfor a push, ms": ["paused_ms"],
}


def draw(steps: Sequence[Mapping[str, float]], title: str, path: Path) -> None:
    """Reward, staleness and pauses below each other, as a PNG file; `steps` are the lines of the CSV."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(7, 6), sharex=True)
    for axis, (label, names) in zip(axes, _PANELS.items(), strict=True):
        for name in names:
            axis.plot([step["step"] for step in steps], [step[name] for step in steps], label=name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.25)
        if len(names) > 1:
            axis.legend(fontsize=8)
    axes[0].set_title(title, fontsize=10)
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
