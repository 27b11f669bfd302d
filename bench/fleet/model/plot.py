"""The curves of the model as a PNG file."""

from pathlib import Path
from typing import Final

from bench.fleet.model.figures import CASES, SIZES, simulated
from bench.fleet.model.topology import TOPOLOGIES

_NUMBERS: Final = tuple(2**power for power in range(11))
_SIZE: Final = (16.0, 10.0)  # inches


def draw(path: Path) -> None:
    """A panel for each model size and calibration."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(CASES), len(SIZES), figsize=_SIZE, sharex=True)
    for row, (case, calibration) in zip(axes, CASES.items(), strict=True):
        for axis, (size, size_bytes) in zip(row, SIZES.items(), strict=True):
            for topology in TOPOLOGIES:
                times_s = [simulated(size_bytes, number, topology, calibration).total_s for number in _NUMBERS]
                axis.plot(_NUMBERS, times_s, marker="o", markersize=3, linewidth=1.2, label=topology.name)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{size}, {case}", fontsize=8)
            axis.grid(visible=True, which="major", alpha=0.25)
        row[0].set_ylabel("s to the new version on all")
    for axis in axes[-1]:
        axis.set_xlabel("replicas")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
