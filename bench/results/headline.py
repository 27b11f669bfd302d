"""What docs/benchmarks/README.md begins with: a real model, how many tokens a core of a server passes on, and what a
token costs the processes that serve it."""

from collections.abc import Mapping

from bench.results.result import Result, markdown, value
from bench.results.tables import SHOWN, per_core

_WAYS = {
    "no_pushes": "genserve, no pushes",
    "in_process_no_pushes": "`AsyncLLM` in the client's process, no updates",
    "genserve": "genserve, pushes",
    "genserve_reuse": 'genserve, pushes with `kv_policy="reuse"`',
    "tmpfs": "`AsyncLLM`, a file in shared memory and a reload",
    "collective_rpc": "`AsyncLLM`, tensors through `collective_rpc`",
}
_SHARE_A_CLIENT = ("in_process", "grpc_floor")
"""Beginnings of the names of what serves nobody else."""


def real_model(results: Mapping[str, Result]) -> str:
    """Tokens per second and waits of a training run, by the way of updating; empty if none was measured."""
    if (run := results.get("cycle")) is None:
        return ""
    rows = []
    for key, by_peer in run.medians.items():
        for peer in (each for each in _WAYS if each in by_peer):
            cells = (
                value(run, key, peer, figure, scale=scale, digits=digits)
                for figure, scale, digits in (
                    ("tokens_per_s", 1.0, 0),
                    ("inter_token_p99_ms", 1.0, 0),
                    ("longest_wait_s", 1.0, 1),
                )
            )
            rows.append([key, _WAYS[peer], *cells])
    header = [
        f"{run.settings['model']}; streams, an update every",
        "",
        "tok/s",
        "inter-token p99, ms",
        "longest wait, s",
    ]
    return markdown(header, rows)


def tokens_per_core(results: Mapping[str, Result]) -> str:
    """Thousand tokens that a second of CPU time of each server is good for; empty if that was not measured."""
    if (serving := results.get("serving")) is None:
        return ""
    rows = [
        [f"`{peer}`", *(per_core(serving, row, peer) for row in serving.medians)]
        for peer in serving.settings["peers"]
        if not peer.startswith(_SHARE_A_CLIENT)
    ]
    return markdown(["thousand tok/s of one core of the server", *serving.medians], rows)


def cpu_per_token(results: Mapping[str, Result]) -> str:
    """CPU time of the serving processes, and the rate at which the busiest one of them fills a core.

    Empty if generation was not measured with CPU times.
    """
    if (generate := results.get("generate")) is None:
        return ""
    keys = [key for key in (*SHOWN, f"{SHOWN[-1]} text") if key in generate.medians]
    at_most = generate.medians.get(SHOWN[-1], {})
    rows = []
    for peer, figures in at_most.items():
        if peer.startswith(_SHARE_A_CLIENT) or "cpu_busiest_us" not in figures:
            continue
        cells = (value(generate, key, peer, "cpu_server_us", digits=0) for key in keys)
        rows.append([f"`{peer}`", *cells, f"{1e6 / figures['cpu_busiest_us']:,.0f}"])
    if not rows:
        return ""
    titles = (f"at {key}".replace(" text", ", with text and log-probabilities") for key in keys)
    return markdown(["CPU µs a token", *titles, f"tok/s that fill a core, at {SHOWN[-1]}"], rows)
