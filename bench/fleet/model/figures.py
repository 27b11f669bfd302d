"""What is simulated for the page: as tables, and as curves in a PNG file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

from bench.fleet.model.calibration import Calibration, link_bound, measured
from bench.fleet.model.push import Outcome, push, push_until_taken
from bench.fleet.model.topology import CHAIN, NAIVE, TOPOLOGIES, TREES, Topology

SIZES: Final = {"1 GB": 1e9, "16 GB": 16e9, "140 GB": 140e9, "1 TB": 1e12}
NUM_REPLICAS: Final = (1, 2, 4, 8, 16, 64, 256, 1024)
MEASURED: Final = "10 Gb/s and 100 Gb/s, this software"
CASES: Final = {
    MEASURED: measured(10),
    "10 Gb/s, if only the links limited it": link_bound(10),
    "100 Gb/s, if only the links limited it": link_bound(100),
}
FAILURES: Final = "### With failures"
DEATHS_PER_HOUR: Final = (0.001, 0.01)
_FAILING: Final = (CHAIN, *TREES[:2])
_MEASURED_BYTES: Final = 269e6
_NUM_SEEDS: Final = 40
_SPARE_SHARE: Final = 16


def simulated(size_bytes: float, num_replicas: int, topology: Topology, calibration: Calibration) -> Outcome:
    """A push in which nothing fails."""
    outcome = push(size_bytes, num_replicas, topology, calibration)
    assert isinstance(outcome, Outcome)
    return outcome


def page() -> Iterator[str]:
    """Lines of markdown."""
    for name, calibration in CASES.items():
        yield from (f"### {name}", "")
        yield from times(calibration)
    yield from ("### What `bench.fleet.push` measures: 269 MB at 1 Gb/s", "")
    yield from _comparison(measured(1))
    yield from ("### Copies and skew", "")
    yield from _costs(CASES[MEASURED])
    yield from (FAILURES, "")
    yield from failures(CASES[MEASURED], [number for number in NUM_REPLICAS if number >= 16])


def times(calibration: Calibration) -> Iterator[str]:
    """Until all replicas serve the new version."""
    yield from _head([f"{number:,}" for number in NUM_REPLICAS], "seconds; replicas")
    for size, size_bytes in SIZES.items():
        for topology in TOPOLOGIES:
            cells = []
            for number in NUM_REPLICAS:
                outcome = simulated(size_bytes, number, topology, calibration)
                cells.append(_seconds(outcome.total_s) + ("†" if outcome.kept_s > calibration.kept_s else ""))
            yield _row(f"{size}, {topology.name}", cells)
    yield ""


def _comparison(calibration: Calibration) -> Iterator[str]:
    numbers = (1, 2, 4)
    yield from _head([str(number) for number in numbers], "seconds; replicas")
    for topology in (NAIVE, CHAIN):
        found = [simulated(_MEASURED_BYTES, number, topology, calibration) for number in numbers]
        yield _row(topology.name, [_seconds(each.total_s) for each in found])
    yield ""


def _costs(calibration: Calibration) -> Iterator[str]:
    yield from _head([f"{number:,}" for number in NUM_REPLICAS], "replicas")
    for topology, name in ((NAIVE, "a copy each"), (CHAIN, "router")):
        found = [simulated(SIZES["16 GB"], number, topology, calibration) for number in NUM_REPLICAS]
        yield _row(f"copies that leave the trainer, {name}", [f"{each.copies:,.0f}" for each in found])
        yield _row(f"seconds from the first commit to the last, {name}", [f"{each.skew_s:.3f}" for each in found])
    yield ""


def failures(calibration: Calibration, numbers: Sequence[int]) -> Iterator[str]:
    """Means over some seeds, for fleets of these sizes."""
    yield from _head([f"{number:,}" for number in numbers], "mean seconds (pushes begun), 140 GB; replicas")
    for rate in DEATHS_PER_HOUR:
        for topology in _FAILING:
            for spare, name in ((0, "all or none"), (_SPARE_SHARE, "without a sixteenth")):
                cells = []
                for number in numbers:
                    found = failing(SIZES["140 GB"], number, topology, calibration, rate, spare and number // spare)
                    pushes = mean(each.num_pushes for each in found)
                    cells.append(f"{_seconds(mean(each.total_s for each in found))} ({pushes:.2f})")
                yield _row(f"{rate:g} deaths an hour each, {topology.name}, {name}", cells)
    yield ""


def failing(
    size_bytes: float, num_replicas: int, topology: Topology, calibration: Calibration, rate: float, spare: int
) -> list[Outcome]:
    """The same push with replicas that die, for each of some seeds."""
    return [
        push_until_taken(size_bytes, num_replicas, topology, calibration, deaths_per_hour=rate, spare=spare, seed=seed)
        for seed in range(_NUM_SEEDS)
    ]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _head(columns: Sequence[str], first: str) -> Iterator[str]:
    yield _row(first, columns)
    yield _row("---", ["---"] * len(columns))


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


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
