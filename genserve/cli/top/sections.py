"""The parts of the screen as lines. Pure.

A width is in cells. Texts from the wire may be of any length; what is too long is cut.
"""

from typing import TYPE_CHECKING, Final

from genserve.cli.quantities import age_text, rate_text, share_text, size_text, sizes_text
from genserve.cli.top.lines import Column, Line, Span, Tone, bar, justified, line, padded, sparkline, table
from genserve.cli.top.questions import KEYS, Kind
from genserve.cli.top.screen import EndedPush, LinkState, Screen, Transfer

if TYPE_CHECKING:
    from genserve.client import FleetReplica, PauseLease

_NAME_CELLS: Final = 12
_VALUE_CELLS: Final = 9
_TOP_CELLS: Final = 12
_BAR_CELLS: Final = 10
_UNKNOWN: Final = "-"
_PHASES: Final = {
    "running": Tone.GOOD,
    "paused": Tone.WARN,
    "applying": Tone.WARN,
    "starting": Tone.WARN,
    "sleeping": Tone.WARN,
    "draining": Tone.WARN,
    "tainted": Tone.BAD,
    "dead": Tone.BAD,
}
_PUSHES: Final = {"receiving": Tone.GOOD, "preparing": Tone.GOOD, "applying": Tone.WARN, "failed": Tone.BAD}
_REPLICAS: Final = {"ready": Tone.GOOD, "unhealthy": Tone.BAD}


def header(screen: Screen, width: int, now_s: float) -> list[Line]:
    """The target, whether it answers, its phase and version."""
    info = screen.info
    served = "" if info is None else f"  {_model(info.model)}, {info.device}"
    who = line(Span("genserve top ", Tone.DIM), Span(screen.target, Tone.STRONG), Span(served, Tone.DIM))
    link, age = screen.link, age_text(now_s - screen.link.since_s)
    if link.state is LinkState.LIVE:
        return [justified(who, line(Span("● live", Tone.GOOD)), width), _state(screen, width, now_s)]
    if link.state is LinkState.CONNECTING:
        return [justified(who, line(Span(f"connecting, {age}", Tone.WARN)), width), _state(screen, width, now_s)]
    state = line(Span(f"lost for {age}: {link.reason}", Tone.BAD))
    return [justified(who, line(Span("● lost", Tone.BAD)), width), state]


def _model(model: str) -> str:
    """A name as it is; of a directory the last part."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def _state(screen: Screen, width: int, now_s: float) -> Line:
    if screen.status is None:
        return line(Span("waiting for the first answer", Tone.DIM))
    state = screen.status.state
    about = "" if screen.saw_version_begin else "over "
    parts = [f"version {state.weight_version} for {about}{age_text(now_s - screen.version_since_s)}"]
    if (lag := screen.newest_version - state.weight_version) > 0:
        parts.append(f"{lag} behind version {screen.newest_version}")
    if state.asleep_tags:
        parts.append(f"asleep: {', '.join(state.asleep_tags)}")
    if screen.replicas is not None:
        ready = sum(each.state == "ready" for each in screen.replicas.replicas)
        parts.append(f"{ready} of {len(screen.replicas.replicas)} replicas ready")
    phase = Span(state.phase.upper(), _PHASES.get(state.phase, Tone.PLAIN))
    left = line(phase, "  ", ", ".join(parts))
    return justified(left, line(Span(f"run {state.instance_id[:8]}", Tone.DIM)), width)


def load(screen: Screen, width: int) -> list[Line]:
    """The last measurement, and its history."""
    now = None if screen.status is None else screen.status.load
    known = now is not None and screen.link.state is LinkState.LIVE
    rates = [transfer.rate for transfer in screen.transfers.shown if transfer.push.state == "receiving"]
    rate = sum(each for each in rates if each is not None)
    rows = [
        ("tokens/s", "tokens_per_s", f"{now.tokens_per_second:,.0f}" if now else "", None),
        ("running", "running", f"{now.running:,}" if now else "", None),
        ("waiting", "waiting", f"{now.waiting:,}" if now else "", None),
        ("KV cache", "kv_usage", f"{now.kv_usage:.0%}" if now else "", 1.0),
        ("prefix hits", "prefix_hit_rate", f"{now.prefix_cache_hit_rate:.0%}" if now else "", 1.0),
        ("push GB/s", "pushed_bytes_per_s", f"{rate / 1e9:.2f}", None),
    ]
    return [_measured(screen, name, field, text if known else _UNKNOWN, top, width) for name, field, text, top in rows]


def _measured(screen: Screen, name: str, field: str, text: str, top: float | None, width: int) -> Line:
    room = width - _NAME_CELLS - _VALUE_CELLS - _TOP_CELLS - 2
    values = screen.history.of(field)
    shown = [each for each in values[-room:] if each is not None] if room > 0 else []
    most = max(shown, default=0.0)
    said = "" if top is not None else f"max {most / 1e9:.2f}" if field == "pushed_bytes_per_s" else f"max {most:,.0f}"
    return line(
        padded(name, _NAME_CELLS),
        Span(padded(text, _VALUE_CELLS, right=True), Tone.STRONG),
        "  ",
        Span(sparkline(values, room, most if top is None else top), Tone.GRAPH),
        Span(padded(said, _TOP_CELLS, right=True), Tone.DIM),
    )


def pushes(screen: Screen, width: int, now_s: float) -> list[Line]:
    """Pushes in flight, and what became of the last ones."""
    rows = [_push(screen, each, now_s) for each in screen.transfers.shown]
    lines: list[Line] = []
    if rows:
        columns = (
            *(Column("PUSH", 10, 36), Column("VERSION", 4, 12), Column("STATE", 9), Column("", _BAR_CELLS)),
            *(Column("", 4, right=True), Column("BYTES", 13, right=True), Column("RATE", 9, right=True)),
            *(Column("FOR", 5, right=True), Column("STREAMS", 7, right=True, extra=True)),
        )
        lines = table(columns, rows, width)
    lines += [_ended(each) for each in screen.ended]
    return lines or [line(Span("none", Tone.DIM))]


def _push(screen: Screen, transfer: Transfer, now_s: float) -> list[Span]:
    push, time, rate = transfer.push, screen.daemon_time(now_s), transfer.rate
    since = push.begin_time if push.state == "receiving" else push.state_time
    share = push.received_bytes / push.total_bytes if push.total_bytes else 1.0
    return [
        Span(push.push_id, Tone.STRONG),
        Span(push.lora_name or f"v{push.weight_version}"),
        Span(push.state, _PUSHES.get(push.state, Tone.PLAIN)),
        Span(bar(share, _BAR_CELLS), Tone.GRAPH),
        Span(share_text(push.received_bytes, push.total_bytes)),
        Span(sizes_text(push.received_bytes, push.total_bytes)),
        Span(_UNKNOWN if rate is None else rate_text(rate)),
        Span(_UNKNOWN if since is None or time is None else f"{max(0.0, (time - since).total_seconds()):.1f} s"),
        Span(str(push.num_streams)),
    ]


def _ended(ended: EndedPush) -> Line:
    push, result = ended.transfer.push, ended.result
    what = push.lora_name or f"v{push.weight_version}"
    if result is None:
        return line(Span(f"{push.push_id}  {what}  ended", Tone.DIM))
    applied = result.applied
    parts = [push.push_id, what, result.push.state, size_text(result.push.total_bytes)]
    if applied is None:
        parts += [description for _, description in result.push.issues[:1]]
        return line(Span("  ".join(parts), Tone.BAD if result.push.state == "failed" else Tone.DIM))
    if (receive_s := applied.step_s.get("receive", 0.0)) > 0:
        parts.append(rate_text(result.push.total_bytes / receive_s))
    parts.append(f"paused {_milliseconds(applied.paused_s)}")
    parts += [f"{step} {_milliseconds(s)}" for step, s in applied.step_s.items() if step in ("receive", "prepare")]
    return line(Span("  ".join(parts), Tone.DIM))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def pauses(screen: Screen, width: int, now_s: float) -> list[Line]:
    """The leases, with the time that is left of each."""
    leases = [] if screen.status is None else screen.status.state.pauses
    if not leases:
        return [line(Span("none", Tone.DIM))]
    columns = (Column("HOLDER", 8, 30), Column("MODE", 5), Column("LEFT", 9, right=True), Column("LEASE", 8, 40))
    own = set(screen.held_leases)
    return table(columns, [_lease(screen, each, now_s, is_own=each.lease_id in own) for each in leases], width)


def _lease(screen: Screen, lease: "PauseLease", now_s: float, *, is_own: bool) -> list[Span]:
    time = screen.daemon_time(now_s)
    if lease.expire_time is None or time is None:
        left = Span("no expiry", Tone.WARN)
    else:
        left_s = max(0.0, (lease.expire_time - time).total_seconds())
        left = Span(f"{left_s:.0f} s", Tone.WARN if left_s < 10 else Tone.PLAIN)
    holder = f"{lease.holder or _UNKNOWN}{' (you)' if is_own else ''}"
    return [Span(holder, Tone.STRONG), Span(lease.mode), left, Span(lease.lease_id, Tone.DIM)]


def replicas(screen: Screen, width: int) -> list[Line]:
    """The replicas of a router: the titles, and one line for each."""
    if screen.replicas is None:
        return [line(Span(screen.replicas_problem or "none", Tone.BAD if screen.replicas_problem else Tone.DIM))]
    if not screen.replicas.replicas:
        return [line(Span("no replica belongs to the fleet", Tone.WARN))]
    columns = (
        *(Column(" REPLICA", 16, 40), Column("STATE", 9), Column("VERSION", 4, 10, right=True)),
        *(Column("LAG", 3, right=True), Column("RUN", 3, right=True), Column("WAIT", 4, right=True)),
        *(Column("KV", 4, right=True), Column("TOK/S", 5, right=True), Column("PUSH", 12, 24)),
        *(Column("HITS", 4, right=True, extra=True), Column("INFLIGHT", 8, right=True, extra=True)),
        Column("", 10, 60, extra=True),
    )
    newest, selected = screen.served_version, screen.selected
    return table(columns, [_replica(each, newest, selected) for each in screen.replicas.replicas], width)


def _replica(replica: "FleetReplica", newest: int, selected: str) -> list[Span]:
    engine, told = replica.engine, replica.load
    lag = 0 if engine is None else newest - engine.weight_version
    chosen = replica.address == selected
    push = replica.pushes[0] if replica.pushes else None
    progress = "" if push is None else f"{push.state} {share_text(push.received_bytes, push.total_bytes)}"
    remark = replica.reason or ("" if engine is None or engine.phase == "running" else f"it is {engine.phase}")
    return [
        Span(f"{'>' if chosen else ' '}{replica.address}", Tone.STRONG if chosen else Tone.PLAIN),
        Span(replica.state, _REPLICAS.get(replica.state, Tone.WARN)),
        Span(_UNKNOWN if engine is None else str(engine.weight_version)),
        Span(_UNKNOWN if engine is None else str(lag), Tone.WARN if lag else Tone.PLAIN),
        Span(_UNKNOWN if told is None else str(told.running)),
        Span(_UNKNOWN if told is None else str(told.waiting)),
        Span(_UNKNOWN if told is None else f"{told.kv_usage:.0%}"),
        Span(_UNKNOWN if told is None else f"{told.tokens_per_second:,.0f}"),
        Span(progress, Tone.GRAPH),
        Span(_UNKNOWN if told is None else f"{told.prefix_cache_hit_rate:.0%}"),
        Span(str(replica.inflight)),
        Span(remark, Tone.DIM),
    ]


def notes(screen: Screen, now_s: float) -> list[Line]:
    """The events, the newest first, and calls without an answer yet."""
    waits = [line(Span(f"{label} ...", Tone.WARN)) for label in screen.pending]
    told = [
        line(Span(f"{age_text(now_s - note.at_s)} ago: ", Tone.DIM), Span(note.text, note.tone))
        for note in screen.notes
    ]
    return [*waits, *reversed(told)]


def keys(screen: Screen) -> list[Line]:
    """The question that is asked, with its answers, or what the keys do."""
    spans: list[Span] = []
    if (question := screen.question) is not None:
        for choice in question.choices:
            spans += [Span(f"{choice.key} ", Tone.STRONG), Span(f"{choice.label}  ")]
        return [line(Span(question.text, Tone.WARN)), (*spans, Span("n ", Tone.STRONG), Span("no"))]
    for key, kind in KEYS.items():
        if kind.value in screen.refused:
            spans += [Span(f"{key} {kind.value} (not allowed)  ", Tone.DIM)]
        elif kind is not Kind.DRAIN or screen.is_router or screen.is_daemon:
            spans += [Span(f"{key} ", Tone.STRONG), Span(f"{kind.value}  ")]
    if screen.is_router:
        spans += [Span("↑↓ ", Tone.STRONG), Span("replica  ")]
    return [(*spans, Span("s ", Tone.STRONG), Span("save SVG  "), Span("q ", Tone.STRONG), Span("quit"))]
