"""Results as JSON files, their tables in docs/benchmarks/README.md, and the four figures that README.md quotes."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.machine import describe

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "benchmarks" / "README.md"
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
    """Milliseconds without generation by size, in parentheses how many memcpy that is; then the phases of one size."""
    table = _by_size(result, "paused, ms (in memcpy)", lambda figures: f"{1000 * figures['paused_s']:,.1f}")
    phases = phases_table(result)
    return f"{table}\n\n{phases}" if phases else table


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


def phases_table(result: Result, size: str = "smollm2") -> str:
    """Milliseconds of each phase of an update of one model, and how many pauses of genserve its pause takes."""
    phases = ["receive_s", "save_s", "prepare_s", "pause_s", "commit_s", "resume_s", "paused_s"]
    by_peer = result.medians.get(size, {})
    rows = []
    for peer in result.settings["peers"]:
        figures = by_peer.get(peer, {})
        if peer == "memcpy" or "total_s" not in figures:
            continue
        cells = [f"{1000 * figures[phase]:,.1f}" if phase in figures else "" for phase in phases]
        ratio = figures["paused_s"] / by_peer["genserve"]["paused_s"]
        rows.append([f"`{peer}`", *cells, f"{ratio:.0f}", f"{1000 * figures['total_s']:,.0f}"])
    header = [f"ms, {size}", *(phase.removesuffix("_s") for phase in phases), "paused / genserve's", "total"]
    return markdown(header, rows) if rows else ""


def figures_table(generate: Result, push: Result, pause: Result, interference: Result) -> str:
    """The four figures that README.md quotes, each with what it compares with."""
    tokens = {peer: f"{each['tokens_per_s']:,.0f}" for peer, each in generate.medians["64"].items()}
    share = {peer: f"{each['tokens_per_s']:.2f}" for peer, each in generate.ratios["64"].items()}
    rates = {peer: f"{each['gb_per_s']:.2f}" for peer, each in push.medians["1000"].items()}
    paused = {peer: f"{1000 * each['paused_s']:,.0f} ms" for peer, each in pause.medians["smollm2"].items()}
    waits = {
        phase: " and ".join(f"{each[f'inter_token_{name}_ms']:.1f}" for name in ("p50", "p99"))
        for phase, each in interference.ratios["smollm2"].items()
    }
    rows = [
        [
            f"pause for a push, {pause.notes['bytes']['smollm2'] / 1e6:,.0f} MB",
            f"**{paused['genserve']}**",
            f"{paused['tmpfs']}: save to shared memory, vLLM reloads; "
            f"{paused['collective_rpc']}: tensors through vLLM's `collective_rpc`",
        ],
        [
            f"generation, {generate.settings['model']} model, 64 streams",
            f"**{tokens['genserve_many']} tok/s** (`GenerateMany`), {tokens['genserve_generate']} (`Generate`)",
            f"{share['genserve_many']} and {share['genserve_generate']} of `AsyncLLM` in process; "
            f"vLLM's gRPC server {share['vllm_grpc']}, its HTTP server {share['vllm_http']}",
        ],
        [
            f"receiving a push, {push.notes['bytes']['1000'] / 1e6:,.0f} MB",
            f"**{rates['genserve']} GB/s** (gRPC), {rates['genserve_shared_memory']} (shared memory)",
            f"{rates['raw_tcp']} GB/s: a plain TCP socket; {rates['naive_stub']}: generated gRPC stubs",
        ],
        [
            "inter-token latency (p50 and p99) during a push, relative to no push",
            f"**{waits['preparing']}** (preparing), {waits['receiving']} (receiving)",
            f"{waits['cpu_hog']}: a process that only computes; {waits['cpu_hog_2']}: two of them",
        ],
    ]
    return markdown(["", "genserve", "compared with"], rows)


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
    "push": ("Pushes", push_table),
    "pause": ("Pause", pause_table),
    "interference": ("Inter-token latency during a push", interference_table),
    "memory": ("Memory", memory_table),
}
FIGURES = ("generate", "push", "pause", "interference")
"""The results that README.md quotes, as `figures_table` takes them."""


def update_page(directory: Path, page: Path = PAGE) -> list[str]:
    """Writes the tables of all results in the directory between the marks of the page; returns the results' names."""
    names = [name for name in TABLES if (directory / f"{name}.json").exists()]
    relative = os.path.relpath(directory.resolve(), page.parent.resolve())
    where = "" if relative == "." else relative + "/"
    parts = []
    for name in names:
        result = Result.load(directory, name)
        title, table = TABLES[name]
        repeated = result.settings["rounds"]
        measured = f"{repeated} pushes" if name == "memory" else f"medians of {repeated}"
        parts.append(
            f"## {title}\n\n[JSON]({where}{name}.json), [curves]({where}{name}.png): {measured} on "
            f"{describe(result.machine)}.\n\n{table(result)}\n"
        )
    _replace(page, "\n".join(parts))
    return names


def update_readme(directory: Path, readme: Path = README) -> None:
    """Writes the four figures between the marks of README.md.

    Raises FileNotFoundError when the directory lacks one of the four results.
    """
    _replace(readme, figures_table(*(Result.load(directory, name) for name in FIGURES)) + "\n")


def _replace(page: Path, text: str) -> None:
    before = page.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise ValueError(f"{page} must have {BEGIN} and {END} once")
    head, rest = before.split(BEGIN)
    page.write_text(head + BEGIN + "\n" + text + END + rest.split(END)[1])
