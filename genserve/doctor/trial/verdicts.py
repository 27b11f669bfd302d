"""Verdicts on the findings of the trials."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Final

from genserve.client import ModelMemory
from genserve.doctor.trial.findings import DigestDiff, MustFail, PushFound, Snapshot, WayFound
from genserve.doctor.verdict import Verdict, fail, ok, warn
from genserve.worker.contract.placement import duration, pause_s

_MB: Final = 1e6
_LONG_PAUSE_S: Final = 0.5
_LONGER: Final = 2.0
"""Ratio to the pause computed from a model's size, above which something is wrong."""
_SLOWED_DOWN: Final = 4.0
"""Ratio of the p50 while preparing to the p50 before, above which a push delays streams too much."""
_REPORT: Final = "Please report it, with the output of `genserve doctor --json`."


def cold_starts(found: Sequence[WayFound]) -> dict[str, Snapshot]:
    """The output of a daemon that was started on a checkpoint, by the name of the checkpoint."""
    return {each.started_on: each.cold for each in reversed(found) if each.cold is not None}


def way_verdicts(
    found: WayFound, cold: Mapping[str, Snapshot], *, expect_cold: bool, own_bytes: float = 0.0
) -> Iterator[Verdict]:
    """Yields every check of one daemon. `expect_cold`: whether each pushed checkpoint should have a cold start.
    `own_bytes`: size of the user's model on each rank, 0 for the built-in one."""
    yield start(found)
    if found.info.get("model_memory"):
        yield reach(ModelMemory(**found.info["model_memory"]))
    if found.pushes:
        yield transport(found.pushes)
    if found.pushed:
        yield tokens(found.pushed, cold, expect_cold=expect_cold)
        yield weights(found.pushed, cold)
        yield labels(found)
    if found.pushes:
        yield streams(found.pushes)
        yield pause(found, own_bytes)
        yield latency(found.pushes)
    if found.misshapen is not None:
        yield misshapen(found.misshapen)
    if found.late is not None:
        yield late(found.late)
    if found.error and found.cold is not None:
        yield fail("checks", f"ended early: {found.error}", _REPORT)
    if found.stopped is not None:
        yield stop(found.stopped)


def start(found: WayFound) -> Verdict:
    """Whether the daemon served, and takes versions in the way that its flags ask for."""
    if found.cold is None:
        advice = "Start it with `genserve serve` and VLLM_LOGGING_LEVEL=INFO to see its whole log."
        return fail("start", found.error or "the daemon printed nothing", advice)
    finding = f"served after {found.start_s:.0f} s on {found.info.get('device', '?')}"
    if found.info.get("model_runner"):  # older daemons do not tell it
        finding += f", model runner {found.info['model_runner']}"
    reported = str(found.info.get("weight_update", ""))
    if found.way and found.way != reported:
        return fail("start", f"{finding}, and takes versions {reported!r} instead of {found.way!r}", _REPORT)
    figures = {"start_s": round(found.start_s, 2)}
    if found.info.get("device") == "cuda" and found.info.get("pinned_host_bytes") == 0:
        advice = "Pushes reach the device several times slower: see `pinned memory` above, and the daemon's log."
        return warn("start", f"{finding}, and its workers have no page-locked memory", advice, **figures)
    return ok("start", finding, **figures)


def reach(memory: ModelMemory) -> Verdict:
    """Whether an exchange reaches everything that the model holds."""
    finding = (
        f"of {memory.reachable_bytes / _MB:.1f} MB that the model reaches, {memory.exchanged_bytes / _MB:.1f} are "
        f"exchanged, {memory.kv_cache_bytes / _MB:.1f} are keys and values, {memory.constant_bytes / _MB:.1f} are "
        f"constant and {memory.hidden_bytes / _MB:.1f} are none of these"
    )
    if memory.hidden_bytes:
        return fail("reach", finding, f"A push does not change this memory. {_REPORT}", **asdict(memory))
    return ok("reach", finding, **asdict(memory))


def transport(pushes: Sequence[PushFound]) -> Verdict:
    """How the bytes were sent."""
    reasons = [push.shared for push in pushes if push.shared]
    if reasons:
        advice = "Pushes from this host will send bytes, several times slower: see `memory between processes` above."
        return warn("transport", f"no shared memory: {reasons[0]}", advice)
    tried = any(push.shared is not None for push in pushes)
    return ok("transport", "bytes, and shared memory" if tried else "bytes")


def tokens(pushed: Sequence[Snapshot], cold: Mapping[str, Snapshot], *, expect_cold: bool) -> Verdict:
    """Whether a pushed version gives the same greedy tokens as a daemon that was started on it."""
    check, advice = (
        "greedy tokens",
        f"The daemon does not serve what was pushed. Do not train on this machine. {_REPORT}",
    )
    compared = [snapshot for snapshot in pushed if snapshot.name in cold]
    for snapshot in compared:
        if snapshot.tokens != cold[snapshot.name].tokens:
            finding = f"after a push of {snapshot.name} they are not those of a cold start on it"
            return fail(check, finding, advice)
    first: dict[str, Snapshot] = {}
    for snapshot in pushed:
        if first.setdefault(snapshot.name, snapshot).tokens != snapshot.tokens:
            return fail(check, f"two pushes of {snapshot.name} gave different ones", advice)
    said = {snapshot.tokens for snapshot in [*cold.values(), *pushed]}
    names = {snapshot.name for snapshot in [*cold.values(), *pushed]}
    if len(said) < len(names):
        return warn(
            check, "both versions generate the same: this proves nothing", "Compare digests: see `weights` below."
        )
    missing = sorted(names - cold.keys())
    if missing and expect_cold:
        return warn(check, f"no daemon started on {', '.join(missing)} to compare with", "See why it did not start.")
    without = f"; {', '.join(missing)} has none to compare with" if missing else ""
    return ok(check, f"{len(compared)} of {len(pushed)} pushes compared with a cold start: equal{without}")


def weights(pushed: Sequence[Snapshot], cold: Mapping[str, Snapshot]) -> Verdict:
    """Whether everything that the workers hold was replaced: the digests equal those of a cold start."""
    check, advice = "weights", f"Part of the model is from another version: a mix is served. {_REPORT}"
    compared = [snapshot for snapshot in pushed if snapshot.digests and snapshot.name in cold]
    if not compared or not any(cold[snapshot.name].digests for snapshot in compared):
        return warn(check, "digests of a push and of a cold start could not be compared", "See why checks ended early.")
    for snapshot in compared:
        diff = DigestDiff.of(cold[snapshot.name].digests, snapshot.digests)
        if diff.differs:
            return fail(check, f"after a push of {snapshot.name}: {diff.words()}", advice)
    for snapshot in pushed:
        same = [each.name for each in cold.values() if each.name != snapshot.name and each.digests == snapshot.digests]
        if snapshot.digests and same:
            return fail(check, f"after a push of {snapshot.name} the workers hold the same as after {same[0]}", advice)
    num_held = len(compared[0].digests)
    return ok(check, f"all {num_held} tensors that the workers hold are those of a cold start", num_held=num_held)


def labels(found: WayFound) -> Verdict:
    """Whether tokens carry the version that sampled them."""
    wrong = not all(snapshot.labelled for snapshot in found.pushed)
    if wrong or not all(push.labels_ok for push in found.pushes):
        return fail("labels", "tokens were labelled with a version that was not served, or not at all", _REPORT)
    return ok("labels", "every token has the version that sampled it, also across a push")


def streams(pushes: Sequence[PushFound]) -> Verdict:
    """Whether running requests continue."""
    lost = next((push.lost for push in pushes if push.lost), "")
    aborted = sum(push.requests_aborted for push in pushes)
    if lost or aborted:
        return fail("streams", f"a push ended requests: {lost or f'{aborted} were aborted'}", _REPORT)
    kept = sum(push.requests_kept for push in pushes)
    if kept == 0:
        return warn(
            "streams", "no request was running at the pause of a push", "Repeat it: the pushes were not under load."
        )
    return ok("streams", f"all continued across {len(pushes)} pushes ({kept} kept)", requests_kept=kept)


def pause(found: WayFound, own_bytes: float) -> Verdict:
    """The time that generation was stopped: milliseconds for the built-in model, and on a GPU the computed time for the
    user's model. On a CPU, `inplace` takes as long as loading."""
    paused_s = [push.paused_s for push in found.pushes]
    p50_s, longest_s = median(paused_s), max(paused_s)
    finding = f"p50 {1000 * p50_s:.1f} ms, longest {1000 * longest_s:.1f} ms, of {len(paused_s)} pushes"
    figures = {"p50_s": p50_s, "longest_s": longest_s}
    limit_s, advice = _LONG_PAUSE_S, "Is the machine busy? The weights themselves are exchanged in milliseconds."
    if own_bytes and found.info.get("device") == "cuda":
        computed_s = pause_s(found.way, int(own_bytes))
        figures["computed_s"] = computed_s
        finding += f"; {duration(computed_s)} computed"
        limit_s = max(limit_s, _LONGER * computed_s)
        advice = "Copies are slower than computed: is the machine busy? See `bandwidth` above."
    elif own_bytes and found.way == "inplace":
        return ok("pause", f"{finding}; this includes loading", **figures)
    return warn("pause", finding, advice, **figures) if p50_s > limit_s else ok("pause", finding, **figures)


def latency(pushes: Sequence[PushFound]) -> Verdict:
    """Inter-token latency while a version is received and prepared, compared with that just before."""
    busy_s = [wait_s for push in pushes for wait_s in push.waits_s]
    idle_s = [wait_s for push in pushes for wait_s in push.idle_waits_s]
    if not busy_s or not idle_s:
        advice = "The model is too small, or the machine too slow, to measure it."
        return warn("inter-token latency", "no token came while a version was prepared", advice)
    idle, busy = (_percentiles(waits_s) for waits_s in (idle_s, busy_s))
    finding = (
        f"p50/p99 {1000 * busy[0]:.1f}/{1000 * busy[1]:.1f} ms while preparing, "
        f"{1000 * idle[0]:.1f}/{1000 * idle[1]:.1f} before"
    )
    figures = {"p50_s": busy[0], "p99_s": busy[1], "idle_p50_s": idle[0], "idle_p99_s": idle[1]}
    if busy[0] > _SLOWED_DOWN * idle[0]:
        return warn("inter-token latency", finding, "Pushes slow down streams: give the daemon more cores.", **figures)
    return ok("inter-token latency", finding, **figures)


def misshapen(tried: MustFail) -> Verdict:
    """Whether a push with a wrong shape is refused, names the tensor, and changes nothing."""
    if tried.reason == "":
        return fail("a misshapen tensor", "it was accepted", _REPORT)
    if tried.reason != "MANIFEST_MISMATCH":
        return fail("a misshapen tensor", f"{tried.reason}: {tried.message}", _REPORT)
    return _unchanged("a misshapen tensor", "refused with MANIFEST_MISMATCH", tried)


def late(tried: MustFail) -> Verdict:
    """Whether a push that fails after all of its bytes arrived changes nothing."""
    if tried.reason == "":
        return warn("a push that ends late", "it was applied in time: this proves nothing", "Repeat it.")
    if tried.reason not in ("DEADLINE_EXCEEDED", "PUSH_ROLLED_BACK"):
        return fail("a push that ends late", f"{tried.reason}: {tried.message}", _REPORT)
    return _unchanged("a push that ends late", f"undone with {tried.reason}", tried)


def stop(problem: str) -> Verdict:
    """Whether the daemon and its processes end."""
    if problem:
        return fail("stop", problem, _REPORT)
    return ok("stop", "SIGTERM ended the daemon and all of its processes")


def _unchanged(check: str, finding: str, tried: MustFail) -> Verdict:
    """Whether the previous version is still served."""
    if tried.after is None:
        return fail(check, f"{finding}, and the daemon did not answer afterwards", _REPORT)
    before, after = tried.before, tried.after
    if (after.tokens, after.digests) != (before.tokens, before.digests) or not after.labelled:
        return fail(check, f"{finding}, and something else is served afterwards", _REPORT)
    return ok(check, f"{finding}; the previous version is served")


def _percentiles(waits_s: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    if len(waits_s) < 2:
        return waits_s[0], waits_s[0]
    return median(waits_s), quantiles(waits_s, n=100, method="inclusive")[98]
