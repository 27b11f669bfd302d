"""Tables of `generate`."""

from collections.abc import Sequence

from bench.results.cells import markdown, value, with_ratio
from bench.results.result import Result
from bench.traces import OUTPUTS

SHOWN = ("64", "256")
"""The concurrencies that are shown in detail."""
CEILING = "in_process"
_CPU = {
    "cpu_client_us": "client",
    "cpu_server_us": "server",
    "cpu_busiest_us": "its busiest process",
    "cpu_engine_us": "engine",
}
_SPLIT = (
    ("one call per request", "grpc_floor", "genserve_generate"),
    ("one call for all", "grpc_floor_many", "genserve_many"),
)


def generate(result: Result) -> str:
    """Tokens per second by concurrency; latency and CPU time at the large ones; other outputs; where CPU time goes."""
    keys = [key for key in result.medians if " " not in key]
    parts = []
    if keys:
        parts.append(throughput(result, keys, "tok/s (share of the ceiling; its lowest and highest in a round) at"))
    shown = [key for key in keys if key in SHOWN] or keys[-1:]
    parts += [detail(result, key) for key in shown]
    if table := split(result, shown):
        parts.append(table)
    for outputs in OUTPUTS[1:]:
        if more := [key for key in result.medians if key.endswith(f" {outputs}")]:
            what = {"logprobs": "with log-probabilities", "text": "with log-probabilities and text"}[outputs]
            parts.append(throughput(result, more, f"tok/s {what} at"))
            parts.append(detail(result, more[-1]))
    return "\n\n".join(parts)


def _peers(result: Result, key: str) -> list[str]:
    return [peer for peer in result.settings["peers"] if peer in result.medians[key]]


def ceiling_of(peer: str) -> str:
    """The peer that it is held against: of those that send one message, the one that does."""
    return CEILING + ("_final" if peer.endswith("_final") else "")


def throughput(result: Result, keys: Sequence[str], title: str) -> str:
    """Tokens per second, and the share of the ceiling."""
    rows = []
    for peer in _peers(result, keys[0]):
        cells = []
        for key in keys:
            ratio = result.ratios.get(key, {}).get(peer, {}).get("tokens_per_s")
            cells.append(with_ratio(result, key, peer, "tokens_per_s", ratio, ceiling_of(peer), digits=0))
        rows.append([f"`{peer}`", *cells])
    return markdown([title, *(key.split()[0] for key in keys)], rows)


def detail(result: Result, key: str) -> str:
    """Latency and CPU time of one concurrency, each with its lowest and highest."""
    peers = _peers(result, key)
    latencies = {"ttft_p50_ms": "first token p50, ms", "ttft_p99_ms": "p99", "inter_token_p99_ms": "inter-token p99"}
    costs = {figure: name for figure, name in _CPU.items() if figure in result.medians[key][peers[0]]}
    rows = []
    for peer in peers:
        cells = [
            "" if figure.startswith("inter_token") and peer.endswith("_final")  # one message: no wait
            else value(result, key, peer, figure)
            for figure in latencies
        ]  # fmt: skip
        cells += [value(result, key, peer, figure, digits=0) for figure in costs]
        rows.append([f"`{peer}`", *cells])
    names = [f"CPU µs a token: {name}" if number == 0 else name for number, name in enumerate(costs.values())]
    return markdown([f"at {key.split()[0]} (lowest–highest)", *latencies.values(), *names], rows)


def split(result: Result, keys: Sequence[str]) -> str:
    """CPU time of client and server together, by whose it is: AsyncLLM's is what it takes in process, gRPC's what the
    floor takes on top of that, genserve's what it takes on top of the floor. Empty if there are no such figures."""
    rows = []
    for key in keys:
        total_us = {
            peer: each["cpu_client_us"] + each["cpu_server_us"]
            for peer, each in result.medians[key].items()
            if "cpu_client_us" in each
        }
        for name, floor, own in _SPLIT:
            if {CEILING, floor, own} <= set(total_us):
                base_us, floor_us, all_us = total_us[CEILING], total_us[floor], total_us[own]
                parts = (base_us, floor_us - base_us, all_us - floor_us)
                rows.append([f"{name}, {key}", *(f"{us:.0f} ({us / all_us:.0%})" for us in parts), f"{all_us:.0f}"])
    header = ["CPU µs a token, client and server, at", "AsyncLLM", "gRPC in Python", "genserve", "all"]
    return markdown(header, rows) if rows else ""
