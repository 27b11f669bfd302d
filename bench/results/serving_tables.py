"""Tables of `serving`."""

from bench.results.cells import markdown, value, with_ratio
from bench.results.result import Result

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


def serving(result: Result) -> str:
    """One table for each number of streams and pace."""
    return "\n\n".join(_table(result, row) for row in result.medians)


def _table(result: Result, row: str) -> str:
    rows = []
    for peer, ratios in ((peer, result.ratios.get(row, {}).get(peer, {})) for peer in result.settings["peers"]):
        if peer in result.medians[row]:
            ratio = ratios.get("tokens_per_core_s")
            rate = with_ratio(result, row, peer, "tokens_per_core_s", ratio, BASELINE, digits=0)
            figures = (value(result, row, peer, figure, digits=digits) for figure, _, digits in _FIGURES)
            rows.append([f"`{peer}`", rate, *figures])
    rate = f"tok/s of one core of the server (of `{BASELINE}`'s)"
    return markdown([row, rate, *(name for _, name, _ in _FIGURES)], rows)
