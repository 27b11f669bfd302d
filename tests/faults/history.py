"""What clients did to a daemon and what it told them, with the times at which they asked and heard. Pure.

Times are seconds on the monotonic clock of the process that runs every client. `invoked_s` is taken before a call
leaves, `responded_s` and `at_s` after an answer has come: what the daemon did lies between. A `life` is one process of
the daemon, numbered from 0; each starts at version 0, and nothing outlives it. What a history has to satisfy is said in
`history_model`.
"""

import enum
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from genserve.rpc.streams.turns import LONGEST_REST_S

START_CONTENT = "start"
"""Name of the weights that a daemon starts with, version 0."""
FRONTEND_LINK = "front end"
"""How the names of connections to front ends begin."""
ANY_LINK = "any"
"""A client that has chosen the connection itself."""
_NUM_ROUNDS = 20
_ROUNDS_S = 1.5


class Outcome(enum.Enum):
    """What a client knows of an operation. UNKNOWN: the answer got lost, and it may take effect at any time after its
    invocation, even long after the client is gone."""

    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PushIntent:
    """What a push is to do; all attempts under one `push_id` have the same. `content` names the bytes that are served
    when it is applied."""

    push_id: str
    version: int
    content: str
    force: bool = False
    expected_version: int | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class AppliedAnswer:
    """What the daemon said of an application. `detail` is the rest of the answer: one application has one."""

    previous_version: int
    active_version: int
    detail: str = ""


@dataclass(slots=True)
class Operation:
    """One call. `kind`: push, stage, validate, commit, discard, look (GetPush), pause, renew, resume, status, weights,
    pull, tokenize. Of a fleet: also rollback, canary (a push to one replica alone), sleep, wake, wake weights,
    push_lora, load_lora, unload_lora, and death: all processes were killed.

    `served` and `phase` are what the answer says of the engine, `link` names the connection, `content` what was pulled.
    `lease_id` and `ttl_s` are those of pauses and what is done with them; `force` ends every lease. `adapter` names the
    content of `lora_name`; `is_everywhere`: no replica was away. `kept`: the versions on the disks after a death.
    """

    kind: str
    client: str
    life: int
    invoked_s: float
    responded_s: float = math.inf
    outcome: Outcome = Outcome.UNKNOWN
    reason: str = ""
    link: str = ""
    served: int | None = None
    phase: str = ""
    push: PushIntent | None = None
    applied: AppliedAnswer | None = None
    content: str = ""
    lease_id: str = ""
    ttl_s: float | None = None
    force: bool = False
    lora_name: str = ""
    lora_version: int = 0
    adapter: str = ""
    is_everywhere: bool = False
    kept: frozenset[int] = frozenset()

    @property
    def may_apply(self) -> bool:
        """Whether this attempt may have put weights in place, as far as its client knows."""
        if self.push is None or self.kind not in ("push", "commit"):
            return False
        return self.outcome is not Outcome.REFUSED


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens [start, end) are said to be of `version`, and of `lora_version` of the adapter; 0 = none."""

    version: int
    start: int
    end: int
    lora_version: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A message of a stream that brought tokens."""

    at_s: float
    num_tokens: int
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Stream:
    """One generation. `immediate`: the daemon was to send each token by itself, and the reader always waited for it, so
    that none was kept back anywhere.

    `finish` is why it ended, and `final_spans` came with that; "" when it was cancelled or broke, with `error` at
    `error_s` then.
    """

    client: str
    life: int
    invoked_s: float
    link: str
    prompt: list[int]
    immediate: bool = True
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    error_s: float = math.inf
    final_spans: tuple[Span, ...] = ()
    lora_name: str = ""

    def versions(self) -> list[int]:
        """The version of each token."""
        return [s.version for delta in self.deltas for s in delta.spans for _ in range(s.start, s.end)]


@dataclass(slots=True)
class UnlabelledStream:
    """One generation over HTTP, which names no version. `at_s` is when each token arrived.

    `finish` is why it ended; "" when it was cancelled or broke, with `error` then. `ended_s` is when either happened.
    """

    client: str
    life: int
    invoked_s: float
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """When the tokens of one span of one delta were sampled: between these two."""

    stream: Stream
    delta: Delta
    span: Span
    not_before_s: float
    at_s: float


class _Probes:
    """Probes that went round on one connection, one after the other. They tell the time before which the tokens of a
    message that arrived at `at_s` were not sampled; -inf = they do not know."""

    def __init__(self, probes: list[Operation]) -> None:
        self._asked_s = [probe.invoked_s for probe in probes]
        self._answered_s = [probe.responded_s for probe in probes]

    def before_rounds(self, at_s: float) -> float:
        """Whatever the stream did meanwhile."""
        old = bisect_left(self._asked_s, at_s - _ROUNDS_S) - 1
        return self._asked(min(old, self._last(at_s) - _NUM_ROUNDS + 1))

    def before_silence(self, heard_s: float, at_s: float) -> float:
        """If the stream was last heard at `heard_s`."""
        first = bisect_right(self._answered_s, self._asked(self._last(at_s) - 1) - LONGEST_REST_S) - 1
        asked_s = self._asked(first)
        return asked_s if asked_s > heard_s else -math.inf

    def _last(self, at_s: float) -> int:
        """The last one that was answered before."""
        return bisect_left(self._answered_s, at_s) - 1

    def _asked(self, index: int) -> float:
        return self._asked_s[index] if index >= 0 else -math.inf


@dataclass(slots=True)
class History:
    """Everything that was recorded, in the order of invocation within each list."""

    operations: list[Operation] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    kills: list[tuple[int, float]] = field(default_factory=list)
    """(life, time) of each daemon's end, or of the moment from which it was to die of a fault."""
    frontend_kills: list[tuple[int, str, float, float]] = field(default_factory=list)
    """(life, link, before, after) each SIGKILL of a front end."""
    unlabelled: list[UnlabelledStream] = field(default_factory=list)

    def lives(self) -> list[int]:
        """The lives that something was recorded of."""
        return sorted({o.life for o in self.operations} | {s.life for s in self.streams})

    def contents(self, life: int) -> dict[int, str]:
        """Name of the bytes by version; versions that two pushes share have the same bytes."""
        intents = [o.push for o in self.operations if o.life == life and o.push is not None]
        return {0: START_CONTENT} | {intent.version: intent.content for intent in intents}

    def windows(self, life: int) -> Iterator[TokenWindow]:
        """When the tokens were sampled, stream by stream in their order."""
        by_link: dict[str, list[Operation]] = {}
        for operation in self.operations:
            if operation.life == life and operation.link and operation.outcome is Outcome.OK:
                by_link.setdefault(operation.link, []).append(operation)
        probes_of = defaultdict(lambda: _Probes([]), {link: _Probes(probes) for link, probes in by_link.items()})
        for stream in self.streams:
            if stream.life != life:
                continue
            probes = probes_of[stream.link]
            heard_s = not_before_s = stream.invoked_s
            for delta in stream.deltas:
                if stream.immediate:
                    not_before_s = max(not_before_s, probes.before_rounds(delta.at_s))
                    if not stream.link.startswith(FRONTEND_LINK):
                        not_before_s = max(not_before_s, probes.before_silence(heard_s, delta.at_s))
                for span in delta.spans:
                    yield TokenWindow(stream, delta, span, not_before_s, delta.at_s)
                heard_s = delta.at_s

    def summary(self) -> str:
        """How much was done, in one line each."""
        kinds = Counter(f"{o.kind} {o.reason or o.outcome.value}" for o in self.operations)
        ends = Counter(stream.finish or stream.error or "cancelled" for stream in self.streams)
        http_ends = Counter(stream.finish or stream.error or "cancelled" for stream in self.unlabelled)
        num_tokens = sum(len(stream.tokens) for stream in self.streams)
        windows = [window for life in self.lives() for window in self.windows(life)]
        num_bounded = sum(window.not_before_s > window.stream.invoked_s for window in windows)
        applied = {
            o.push.push_id + str(o.life) for o in self.operations if o.push is not None and o.applied is not None
        }
        return "\n".join(
            [
                f"{len(self.operations)} operations, {len(self.streams)} streams, {num_tokens} tokens, "
                f"{len(applied)} pushes known to be applied, {len(self.lives())} lives, {len(self.kills)} deaths",
                f"{num_bounded} of {len(windows)} runs of tokens have a lower bound from a probe",
                "operations: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())),
                "streams: " + ", ".join(f"{end} {n}" for end, n in sorted(ends.items())),
                f"{len(self.unlabelled)} over HTTP, {sum(len(stream.tokens) for stream in self.unlabelled)} tokens: "
                + ", ".join(f"{end} {n}" for end, n in sorted(http_ends.items())),
            ]
        )


def excerpt(history: History, life: int, at_s: float, num_lines: int = 40) -> str:
    """What happened around a moment, as a timeline: an arrow to the right is a call, one to the left its answer.

    Probes are left out; messages of one stream under one version are drawn together.
    """
    lines: list[tuple[float, str]] = []
    for operation in history.operations:
        if operation.life != life or operation.link:  # a probe
            continue
        about = f"{operation.client:<12} {operation.kind} {_about(operation)}"
        lines.append((operation.invoked_s, f"-> {about}"))
        if math.isfinite(operation.responded_s):
            lines.append((operation.responded_s, f"<- {about} {_answer(operation)}"))
    for stream in history.streams:
        if stream.life == life:
            lines += _stream_lines(stream)
    lines += [(at_s, f"xx {link} is killed") for dead, link, at_s, _ in history.frontend_kills if dead == life]
    lines += [(killed_s, "xx the daemon shall die") for dead, killed_s in history.kills if dead == life]
    lines.append((at_s, "** the violation **"))
    lines.sort(key=lambda line: line[0])
    middle = next(i for i, (_, text) in enumerate(lines) if text.startswith("**"))
    shown = lines[max(0, middle - num_lines // 2) : middle + num_lines // 2]
    return "\n".join(f"{1000 * (time_s - at_s):+10.1f} ms {text}" for time_s, text in shown)


def _stream_lines(stream: Stream) -> Iterator[tuple[float, str]]:
    yield stream.invoked_s, f"-> {stream.client:<12} generate"
    runs: list[list[float]] = []  # version, first token, end, first and last time
    for delta in stream.deltas:
        for span in delta.spans:
            if runs and runs[-1][0] == span.version:
                runs[-1][2], runs[-1][4] = span.end, delta.at_s
            else:
                runs.append([span.version, span.start, span.end, delta.at_s, delta.at_s])
    for version, start, end, first_s, last_s in runs:
        until = f" until {1000 * (last_s - first_s):+.1f} ms" if last_s > first_s else ""
        yield first_s, f"<- {stream.client:<12} tokens {start:g}-{end:g} under version {version:g}{until}"


def _about(operation: Operation) -> str:
    push, parts = operation.push, []
    if push is not None:
        parts.append(f"{push.push_id} version {push.version} ({push.content})")
        parts += ["force"] * push.force + ["partial"] * push.partial
        parts += [f"expects {push.expected_version}"] * (push.expected_version is not None)
    if operation.lease_id:
        parts.append(f"lease {operation.lease_id[:6]}")
    parts += [f"{operation.lora_name} {operation.lora_version or ''} ({operation.adapter})"] * bool(operation.lora_name)
    parts += [f"kept {sorted(operation.kept)}"] * bool(operation.kept)
    if operation.ttl_s is not None:
        parts.append(f"for {operation.ttl_s:g} s")
    return " ".join(parts)


def _answer(operation: Operation) -> str:
    parts = [operation.reason or operation.outcome.value]
    if operation.applied is not None:
        parts.append(f"{operation.applied.previous_version} -> {operation.applied.active_version}")
    if operation.served is not None:
        parts.append(f"[serves {operation.served} {operation.phase}]")
    return " ".join(parts)
