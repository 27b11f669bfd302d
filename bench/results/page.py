"""What the pages show of the results, written between their marks: docs/benchmarks/README.md, README.md, the goals."""

import os
from collections.abc import Callable
from pathlib import Path

from bench.machine import describe
from bench.results import headline, standings, tables
from bench.results.result import Result, markdown, value
from bench.results.tables import PACE_MS, row_name

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "benchmarks" / "README.md"
GOALS_PAGE = README.parent / "docs" / "internals" / "goals.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"

TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "generate": ("Generation", tables.generate),
    "serving": ("A token's way through a server", tables.serving),
    "cycle": ("A training run", tables.cycle),
    "push": ("Pushes", tables.push),
    "pause": ("Pause", tables.pause),
    "interference": ("Inter-token latency during a push", tables.interference),
    "memory": ("Memory", tables.memory),
}
FIGURES = ("serving", "push", "pause", "interference")
"""The results that README.md quotes, as `figures` takes them."""


def figures(serving: Result, push: Result, pause: Result, interference: Result) -> str:
    """The four promises of README.md, each with a figure, its range over the rounds, and what it compares with."""
    row = row_name(64, PACE_MS)
    per_core = {peer: tables.per_core(serving, row, peer) for peer in serving.medians[row]}
    rates = {peer: value(push, "1000", peer, "gb_per_s", digits=2) for peer in push.medians["1000"]}
    paused = {
        peer: value(pause, "smollm2", peer, "paused_s", scale=1000, digits=0) for peer in pause.medians["smollm2"]
    }
    wait = {
        peer: value(pause, "smollm2", peer, "longest_wait_s", scale=1000, digits=0) for peer in pause.medians["smollm2"]
    }
    total = {peer: f"{each['total_s']:.1f} s" for peer, each in pause.medians["smollm2"].items()}
    waits = {
        phase: " (p99: ".join(f"{each[f'inter_token_{name}_ms']:.1f}" for name in ("p50", "p99")) + ")"
        for phase, each in interference.ratios["smollm2"].items()
    }
    others = {
        "vllm_grpc": "vLLM's gRPC server",
        "vllm_http_tokens": "its HTTP server",
        "rust_http_tokens": "the one in Rust",
    }
    rows = [
        [
            "**Streams go on during an update.** It is prepared beside the live weights, and then exchanged on all "
            "ranks or on none",
            f"**{waits['preparing']} times** the time between two tokens while a version is prepared",
            f"{waits['receiving']} while it arrives; {waits['cpu_hog']} beside a process that only computes",
        ],
        [
            "**Pauses of milliseconds.** Only the exchange happens inside the pause, and running requests continue",
            f"**{paused['genserve']} ms** for {pause.notes['bytes']['smollm2'] / 1e6:,.0f} MB; the whole update "
            f"{total['genserve']}; longest wait of a stream {wait['genserve']} ms",
            f"{paused['tmpfs']} ms; {total['tmpfs']}; {wait['tmpfs']} ms: save to shared memory, vLLM reloads",
        ],
        [
            "**Weights over the same API**, in any language: no NCCL rendezvous, no pickle, no second port",
            f"**{rates['genserve']} GB/s** over gRPC, {rates['genserve_shared_memory']} through shared memory",
            f"{rates['raw_tcp']}: a plain TCP socket; {rates['naive_stub']}: generated gRPC stubs",
        ],
        [
            "**Many prompts over one stream**, every token with the version of the weights that sampled it",
            f"**{per_core['genserve_many']} thousand tokens/s of one core** of the server: computed from its CPU time "
            f"before an engine that computes nothing, 64 at once, {PACE_MS} ms a step",
            ", ".join(f"{name} {per_core[peer]}" for peer, name in others.items() if peer in per_core),
        ],
    ]
    return markdown(["promise", "measured on two CPU cores: median (lowest–highest)", "compared with"], rows)


def update_page(directory: Path, page: Path = PAGE) -> list[str]:
    """Writes the tables of all results in the directory between the marks of the page; returns the results' names."""
    results = measured_in(directory)
    relative = os.path.relpath(directory.resolve(), page.parent.resolve())
    where = "" if relative == "." else relative + "/"
    first = {
        "With a real model": headline.real_model(results),
        "Tokens of one core": headline.tokens_per_core(results),
        "CPU time a token": headline.cpu_per_token(results),
        "Who is first": standings.first(results),
    }
    parts = [f"## {heading}\n\n{table}\n" for heading, table in first.items() if table]
    for name, result in results.items():
        title, table = TABLES[name]
        repeated = result.settings["rounds"]
        measured = f"{repeated} pushes" if name == "memory" else f"medians of {repeated} rounds"
        parts.append(
            f"## {title}\n\n[JSON]({where}{name}.json), [curves]({where}{name}.png): {measured}. "
            f"{describe(result.machine)}.\n\n{table(result)}\n"
        )
    replace_marked(page, "\n".join(parts))
    return list(results)


def measured_in(directory: Path) -> dict[str, Result]:
    """The results that a directory has, by name, in the order of the page."""
    return {name: Result.load(directory, name) for name in TABLES if (directory / f"{name}.json").exists()}


def update_goals(directory: Path, page: Path = GOALS_PAGE) -> None:
    """Writes which of the project's own goals the results reach between the marks of their page."""
    replace_marked(page, standings.goals(measured_in(directory)) + "\n")


def update_readme(directory: Path, readme: Path = README) -> None:
    """Writes the four promises, each with its figure, between the marks of README.md.

    Raises FileNotFoundError when the directory lacks one of the four results.
    """
    replace_marked(readme, figures(*(Result.load(directory, name) for name in FIGURES)) + "\n")


def replace_marked(page: Path, text: str) -> None:
    """Writes what stands between the marks of a page. Raises ValueError if it does not have them once."""
    before = page.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise ValueError(f"{page} must have {BEGIN} and {END} once")
    head, rest = before.split(BEGIN)
    page.write_text(head + BEGIN + "\n" + text + END + rest.split(END)[1])
