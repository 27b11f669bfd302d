"""What docs/benchmarks/README.md and README.md show of the results, written between their marks."""

import os
from collections.abc import Callable
from pathlib import Path

from bench.machine import describe
from bench.results import generation_tables, standings, update_tables
from bench.results.cells import markdown, value
from bench.results.generation_tables import ceiling_of
from bench.results.result import Result

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "benchmarks" / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"

TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "generate": ("Generation", generation_tables.generate),
    "cycle": ("A training run", update_tables.cycle),
    "push": ("Pushes", update_tables.push),
    "pause": ("Pause", update_tables.pause),
    "interference": ("Inter-token latency during a push", update_tables.interference),
    "memory": ("Memory", update_tables.memory),
}
FIGURES = ("generate", "push", "pause", "interference")
"""The results that README.md quotes, as `figures` takes them."""


def figures(generate: Result, push: Result, pause: Result, interference: Result) -> str:
    """The four figures that README.md quotes, each with what it compares with and with the range of its rounds."""

    def share(peer: str) -> str:
        ratio = generate.ratios["64"][peer]["tokens_per_s"]
        low, high = generate.range_of_ratio("64", peer, "tokens_per_s", ceiling_of(peer))
        return f"{ratio:.2f} ({low:.2f}–{high:.2f})"

    tokens = {peer: f"{each['tokens_per_s']:,.0f}" for peer, each in generate.medians["64"].items()}
    rates = {peer: value(push, "1000", peer, "gb_per_s", digits=2) for peer in push.medians["1000"]}
    paused = {
        peer: value(pause, "smollm2", peer, "paused_s", scale=1000, digits=0) for peer in pause.medians["smollm2"]
    }
    total = {peer: f"{each['total_s']:.1f} s" for peer, each in pause.medians["smollm2"].items()}
    waits = {
        phase: " and ".join(f"{each[f'inter_token_{name}_ms']:.1f}" for name in ("p50", "p99"))
        for phase, each in interference.ratios["smollm2"].items()
    }
    others = {"vllm_grpc": "vLLM's gRPC server", "vllm_http": "its HTTP server", "rust_http_tokens": "the one in Rust"}
    rows = [
        [
            f"pause for a push, {pause.notes['bytes']['smollm2'] / 1e6:,.0f} MB, ms",
            f"**{paused['genserve']}**; the whole update {total['genserve']}",
            f"{paused['tmpfs']}; {total['tmpfs']}: save to shared memory, vLLM reloads. "
            f"{paused['collective_rpc']}; {total['collective_rpc']}: tensors through vLLM's `collective_rpc`",
        ],
        [
            f"generation, {generate.settings['model']} model, 64 streams",
            f"**{tokens['genserve_many']} tok/s** (`GenerateMany`), {tokens['genserve_generate']} (`Generate`)",
            f"{share('genserve_many')} and {share('genserve_generate')} of `AsyncLLM` in process; "
            + ", ".join(f"{name} {share(peer)}" for peer, name in others.items() if peer in tokens),
        ],
        [
            f"receiving a push, {push.notes['bytes']['1000'] / 1e6:,.0f} MB, GB/s",
            f"**{rates['genserve']}** (gRPC), {rates['genserve_shared_memory']} (shared memory)",
            f"{rates['raw_tcp']}: a plain TCP socket; {rates['naive_stub']}: generated gRPC stubs",
        ],
        [
            "inter-token latency (p50 and p99) during a push, relative to no push",
            f"**{waits['preparing']}** (preparing), {waits['receiving']} (receiving)",
            f"{waits['cpu_hog']}: a process that only computes; {waits['cpu_hog_2']}: two of them",
        ],
    ]
    return markdown(["median (lowest–highest of the rounds)", "genserve", "compared with"], rows)


def update_page(directory: Path, page: Path = PAGE) -> list[str]:
    """Writes the tables of all results in the directory between the marks of the page; returns the results' names."""
    results = {name: Result.load(directory, name) for name in TABLES if (directory / f"{name}.json").exists()}
    relative = os.path.relpath(directory.resolve(), page.parent.resolve())
    where = "" if relative == "." else relative + "/"
    parts = [f"## Who is first\n\n{standings.first(results)}\n", f"## Goals\n\n{standings.goals(results)}\n"]
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


def update_readme(directory: Path, readme: Path = README) -> None:
    """Writes the four figures between the marks of README.md.

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
