"""Results as JSON files, and their tables in Markdown, which README.md takes from the files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.machine import describe

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement: `rounds` is raw, `medians` over the rounds, `ratios` to what the measurement names as its
    ceiling or baseline. All three are keyed by size or concurrency, then by peer."""

    name: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    rounds: dict[str, Any]
    medians: dict[str, Any]
    ratios: dict[str, Any]
    notes: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        """Writes NAME.json."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_text(json.dumps(rounded(asdict(self)), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, directory: Path, name: str) -> "Result":
        """Reads it."""
        return cls(**json.loads((directory / f"{name}.json").read_text()))


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, over the rounds."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def rounded(value: Any) -> Any:
    """Figures to six digits: what is beyond them is noise, and makes files that nobody can read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def generate_table(result: Result) -> str:
    """Tokens per second by concurrency, and the share of the ceiling at the largest common one."""
    keys = list(result.medians)
    rows = []
    for peer in result.settings["peers"]:
        cells = []
        for key in keys:
            figures, ratio = result.medians[key][peer], result.ratios.get(key, {}).get(peer)
            share = "" if ratio is None else f" ({ratio['tokens_per_s']:.2f})"
            cells.append(f"{figures['tokens_per_s']:,.0f}{share}")
        last = result.medians["64" if "64" in keys else keys[-1]][peer]
        between = "" if peer.endswith("_final") else f" / {last['inter_token_p99_ms']:.1f}"  # one message: no wait
        cells.append(f"{last['ttft_p50_ms']:.1f}{between}")
        rows.append([f"`{peer}`", *cells])
    shown = "64" if "64" in keys else keys[-1]
    header = ["tok/s (share of the ceiling) at", *keys, f"first token p50 / inter-token p99 at {shown}, ms"]
    return markdown(header, rows)


def push_table(result: Result) -> str:
    """GB/s by size, and in parentheses the share of the raw socket's."""
    return _by_size(result, "GB/s (of the raw socket's)", lambda figures: f"{figures['gb_per_s']:.2f}")


def pause_table(result: Result) -> str:
    """Milliseconds for which generation stood still by size, and in parentheses how many memcpy that is."""
    return _by_size(result, "paused, ms (in memcpy)", lambda figures: f"{1000 * figures['paused_s']:,.1f}")


def _by_size(result: Result, what: str, cell: Callable[[Mapping[str, float]], str]) -> str:
    rows = []
    for peer in result.settings["peers"]:
        cells = []
        for size, by_peer in result.medians.items():
            ratio = result.ratios.get(size, {}).get(peer)
            cells.append(cell(by_peer[peer]) + ("" if ratio is None else f" ({ratio:.2f})"))
        rows.append([f"`{peer}`", *cells])
    sizes = (f"{result.notes['bytes'][size] / 1e6:,.0f} MB" for size in result.medians)
    return markdown([f"{what}, model of", *sizes], rows)


def interference_table(result: Result) -> str:
    """Inter-token latency by what else goes on."""
    rows = []
    for key, by_phase in result.medians.items():
        for phase, figures in by_phase.items():
            ratio = result.ratios.get(key, {}).get(phase)
            cells = [
                f"{figures[name]:.1f}" + ("" if ratio is None else f" ({ratio[name]:.2f})")
                for name in ("inter_token_p50_ms", "inter_token_p99_ms")
            ]
            rows.append([key, phase.replace("_", " "), *cells])
    return markdown(["model", "meanwhile", "inter-token p50, ms (ratio)", "p99"], rows)


def memory_table(result: Result) -> str:
    """Host memory before, at its peak and after."""
    rows = []
    for key, figures in result.medians.items():
        cells = [f"{figures[name] / 1e6:,.0f}" for name in ("before", "peak", "after_first", "after_last")]
        rows.append([key, *cells, f"{result.ratios[key]['staging_of_limit']:.2f}"])
    return markdown(["model", "before, MB", "peak", "after 1 push", "after the last", "staging / limit"], rows)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "generate": ("Generation", generate_table),
    "push": ("Weights in", push_table),
    "pause": ("Pause", pause_table),
    "interference": ("Streams meanwhile", interference_table),
    "memory": ("Memory", memory_table),
}


def update_readme(directory: Path, readme: Path = README) -> list[str]:
    """Writes the tables of all results that are there between the marks; the names of those."""
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme} must have {BEGIN} and {END} once")
    names = [name for name in TABLES if (directory / f"{name}.json").exists()]
    parts = []
    for name in names:
        result = Result.load(directory, name)
        title, table = TABLES[name]
        repeated = result.settings["rounds"]
        measured = f"{repeated} pushes" if name == "memory" else f"medians of {repeated}"
        relative = directory.resolve().relative_to(readme.parent.resolve())
        parts.append(
            f"**{title}** ([JSON]({relative}/{name}.json), [curves]({relative}/{name}.png)): {measured} "
            f"on {describe(result.machine)}.\n\n{table(result)}\n"
        )
    before, rest = text.split(BEGIN)
    readme.write_text(before + BEGIN + "\n" + "\n".join(parts) + END + rest.split(END)[1])
    return names
