"""Tables of results as markdown: of generation, of serving before an engine that computes nothing, and of updates of
weights."""

from collections.abc import Sequence

from bench.results.result import Result, markdown, value, with_ratio
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


BASELINE = "vllm_http"
PACE_MS = 50
"""How long a step takes, where it takes any time."""
_FIGURES = (
    ("tokens_per_s", "tok/s", 0),
    ("tokens_per_message", "tokens a message", 1),
    ("cpu_server_us", "CPU µs a token: server", 0),
    ("cpu_busiest_us", "its busiest process", 0),
    ("cpu_client_us", "client", 0),
)


def row_name(num_streams: int, pace_ms: int, outputs: str = "tokens") -> str:
    """Where a result has the figures: `64 streams, 50 ms a step`, `64 streams, steps at once, with logprobs`."""
    pace = f"{pace_ms} ms a step" if pace_ms else "steps at once"
    return f"{num_streams} streams, {pace}" + ("" if outputs == "tokens" else f", with {outputs}")


def per_core(result: Result, row: str, peer: str) -> str:
    """Thousand tokens that a second of a server's CPU time is good for. That time is counted in steps of 10 ms."""
    return value(result, row, peer, "tokens_per_core_s", scale=1e-3, digits=0)


def serving(result: Result) -> str:
    """One table for each number of streams and pace."""
    return "\n\n".join(_table(result, row) for row in result.medians)


def _table(result: Result, row: str) -> str:
    rows = []
    for peer, ratios in ((peer, result.ratios.get(row, {}).get(peer, {})) for peer in result.settings["peers"]):
        if peer in result.medians[row]:
            ratio = ratios.get("tokens_per_core_s")
            rate = with_ratio(result, row, peer, "tokens_per_core_s", ratio, BASELINE, scale=1e-3, digits=0)
            figures = (value(result, row, peer, figure, digits=digits) for figure, _, digits in _FIGURES)
            rows.append([f"`{peer}`", rate, *figures])
    rate = f"thousand tok/s of one core of the server (of `{BASELINE}`'s)"
    return markdown([row, rate, *(name for _, name, _ in _FIGURES)], rows)


_PHASES = ("receive_s", "save_s", "prepare_s", "pause_s", "commit_s", "resume_s")


def cycle(result: Result) -> str:
    """What pushes cost a training run, by the number of streams and the interval."""
    figures = {
        "share": ("tokens, share of no pushes", 1.0, 2),
        "lost_s_per_push": ("generation lost a push, s", 1.0, 2),
        "seconds_per_push": ("there was one every, s", 1.0, 1),
        "push_s": ("a push takes, s", 1.0, 1),
        "first_new_s": ("to the first new token, s", 1.0, 2),
        "all_new_s": ("in every stream", 1.0, 2),
        "old_share": ("tokens of the old version after it began", 1.0, 2),
        "inter_token_p99_ms": ("inter-token p99, ms", 1.0, 0),
        "longest_wait_s": ("longest wait, s", 1.0, 1),
    }
    rows = []
    for key, by_peer in result.medians.items():
        for peer in (each for each in result.settings["peers"] if each in by_peer):
            tokens = value(result, key, peer, "tokens_per_s", digits=0)
            cells = [
                value(result, key, peer, figure, scale=scale, digits=digits)
                for figure, (_, scale, digits) in figures.items()
            ]
            rows.append([key, f"`{peer}`", tokens, *cells])
    return markdown(["streams, a push every", "", "tok/s", *(title for title, _, _ in figures.values())], rows)


def push(result: Result) -> str:
    """GB/s by size, and the share of the raw socket's."""
    return _by_size(result, "gb_per_s", "GB/s (of the raw socket's)", digits=2)


def pause(result: Result) -> str:
    """Milliseconds without generation by size, in memcpys; the whole update; the phases of one size."""
    tables = [
        _by_size(result, "paused_s", "paused, ms (in memcpy)", scale=1000),
        totals(result),
        phases(result),
    ]
    return "\n\n".join(table for table in tables if table)


def _by_size(result: Result, figure: str, what: str, *, scale: float = 1.0, digits: int = 1) -> str:
    baseline = result.notes["ratio_to"]
    rows = []
    for peer in result.settings["peers"]:
        cells = []
        for size, by_peer in result.medians.items():
            ratio = None
            if baseline in by_peer and figure in by_peer[peer]:
                ratio = by_peer[peer][figure] / by_peer[baseline][figure]
            cells.append(with_ratio(result, size, peer, figure, ratio, baseline, scale=scale, digits=digits))
        rows.append([f"`{peer}`", *cells])
    sizes = (f"{result.notes['bytes'][size] / 1e6:,.0f} MB" for size in result.medians)
    return markdown([f"{what}; lowest–highest ratio in a round; model of", *sizes], rows)


def totals(result: Result) -> str:
    """Milliseconds of the whole update, from its start until the new version is served."""
    rows = []
    for peer in result.settings["peers"]:
        cells = [value(result, size, peer, "total_s", scale=1000, digits=0) for size in result.medians]
        rows.append([f"`{peer}`", *cells])
    sizes = (f"{result.notes['bytes'][size] / 1e6:,.0f} MB" for size in result.medians)
    return markdown(["the whole update, ms (lowest–highest); model of", *sizes], rows)


def phases(result: Result, size: str = "smollm2") -> str:
    """Milliseconds of each phase of an update of one model, and how many pauses of genserve its pause takes."""
    by_peer = result.medians.get(size, {})
    rows = []
    for peer in result.settings["peers"]:
        figures = by_peer.get(peer, {})
        if peer == "memcpy" or "total_s" not in figures:
            continue
        cells = [f"{1000 * figures[phase]:,.1f}" if phase in figures else "" for phase in _PHASES]
        ratio = figures["paused_s"] / by_peer["genserve"]["paused_s"]
        paused = value(result, size, peer, "paused_s", scale=1000)
        totals = [value(result, size, peer, name, scale=1000, digits=0) for name in ("total_s", "longest_wait_s")]
        rows.append([f"`{peer}`", *cells, paused, f"{ratio:.0f}", *totals])
    names = (phase.removesuffix("_s") for phase in _PHASES)
    header = [f"ms, {size}", *names, "paused (lowest–highest)", "paused / genserve's", "total", "longest wait"]
    return markdown(header, rows) if rows else ""


def interference(result: Result) -> str:
    """Inter-token latency by what else goes on."""
    baseline = result.notes["ratio_to"]
    rows = []
    for key, by_phase in result.medians.items():
        for phase in by_phase:
            ratios = result.ratios.get(key, {}).get(phase, {})
            cells = [
                with_ratio(result, key, phase, name, ratios.get(name), baseline)
                for name in ("inter_token_p50_ms", "inter_token_p99_ms")
            ]
            rows.append([key, phase.replace("_", " "), *cells])
    return markdown(["model", "meanwhile", "inter-token p50, ms (ratio; lowest–highest in a round)", "p99"], rows)


def memory(result: Result) -> str:
    """Host memory before, at its peak and after."""
    rows = []
    for key, figures in result.medians.items():
        cells = [f"{figures[name] / 1e6:,.0f}" for name in ("before", "peak", "after_first", "after_last")]
        later = [each["total"] / 1e6 for each in result.rounds[key]["after_push"][1:]]
        spread = f"{min(later):,.0f}–{max(later):,.0f}" if later else ""
        rows.append([key, *cells, spread, f"{result.ratios[key]['staging_of_limit']:.2f}"])
    after = ["after 1 push", "after the last", "after the others (lowest–highest)"]
    return markdown(["model", "before, MB", "peak", *after, "staging / limit"], rows)
