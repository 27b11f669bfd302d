"""Tables of what measures updates: `cycle`, `push`, `pause`, `interference` and `memory`."""

from bench.results.cells import markdown, value, with_ratio
from bench.results.result import Result

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
