"""What a history has to satisfy: the daemon as one register of weights that streams read and pushes write. Pure.

**Writes.** A push is applied at most once in a life of the daemon, at one moment between the invocation of an attempt
at it (a push, a repeat under the same id, a commit of what was staged) and that attempt's answer. An attempt that was
refused did not apply it, so a push that was refused every time is never seen. An attempt whose answer is unknown (the
client was killed, cancelled or cut off, or the daemon answered an error that leaves it open) may apply it at any time
after its invocation, or never: its end is that of the life. Every answer for one push id tells the same application.

**Reads.** Each answer that names the served version, a refusal for its version included, read it between its invocation
and itself. Each run of tokens labelled with a version was sampled between `not_before_s` and its arrival.

**When a token was sampled.** Not after it arrived, and not before its request. The second bound is weak for a long
stream, so it is moved up without any clock: a probe (GetStatus) goes round all the time on the connection that the
streams use. Pauses and commits are answered on the engine's output queue, behind all tokens that were sampled before
them. So when a probe begins after such an answer, these tokens have reached the calls of their streams. There they wait
until it is their turn to be written, LONGEST_REST_S at most. The connection then delivers in order, but the reader of a
stream may be woken up after the caller of a probe whose answer came later. So tokens that come after a silence were
sampled after the invocation of its first probe, if the stream asks for each token by itself, its reader waited, and two
more probes went round in the silence, one after the other, LONGEST_REST_S after the answer to the first one.

That does not hold for a front end: the answer to a pause does not go through it, and may overtake tokens that wait in
its sockets. Its event loop reads these within a few rounds; on two busy cores, tokens that fit the weights of their
label came 0.8 s after twenty rounds had begun. So twenty probes (Tokenize) must have gone round one after the other on
the connection of the stream, over a second and a half at least: what arrives then was sampled after the invocation of
the first one, whether the stream was silent or not. The daemon's own streams have this bound too. A stream whose client
has chosen the front end itself has only that of its request.

**What is checked**, life by life:

- *unknown label*, *refused push seen*, *seen too early*: a version that nobody pushed, that was never accepted, or that
  was seen before anybody asked for it;
- *applied twice*: answers for one push id differ, or an application replaced itself; *nothing told*: a push is answered
  with success, but not with what was applied; *forgotten*: a repeat of a push that was answered with success is refused
  (the daemon remembers the last 64, and no trainer here asks after older ones);
- *not linearizable*: no order of applications within these intervals explains all reads; above all a version seen
  after another was known to have replaced it (see `linearizability`);
- *went back*: within a stream a lower version follows a higher one, and no forced push to that version or one below it
  can have been applied meanwhile;
- *token in a pause*: tokens were surely sampled while a lease was surely held: after the answer to Pause, before anyone
  asked to resume that lease or all, and before its time to live, counted from the invocation of Pause or of a renewal
  that was answered, can have been over;
- *token while tainted*: the same after ENGINE_TAINTED and before the invocation of the next attempt to apply;
- *stream failed*, *internal error*: a stream ended with an error, or a call with one that nobody foresaw, while the
  daemon and the front end lived on;
- *aborted by nobody*: a stream ended as ABORTED, which no client asks for here: a pause ends streams as PAUSED;
- *other bytes*: what was pulled is not what was pushed under its version;
- *broken spans*: the spans of a message do not cover its tokens, or those of the finish do not repeat them;
- *label on other weights*: a token that is not the likeliest one, given all before it, under the weights that its label
  names (`label_violations`; the streams are greedy, and pushes recompute keys and values).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.faults.history import (
    ANY_LINK,
    AppliedAnswer,
    History,
    Operation,
    Outcome,
    PushIntent,
    Stream,
    excerpt,
)
from tests.faults.labels import Labels
from tests.faults.linearizability import Read, Write, contradiction


@dataclass(frozen=True, slots=True)
class Violation:
    """What cannot be, in which life of the daemon and when."""

    kind: str
    text: str
    life: int
    at_s: float

    def describe(self, history: History) -> str:
        """With what happened around it."""
        return f"life {self.life}: {self.kind}: {self.text}\n{excerpt(history, self.life, self.at_s)}"


def violations(history: History) -> list[Violation]:
    """Everything that is wrong, but for labels on other weights."""
    found: list[Violation] = []
    for life in history.lives():
        found += _Life(history, life).violations()
    return found


def label_violations(
    history: History, behind: Mapping[int, Mapping[str, Sequence[float]]], tolerance: float
) -> list[Violation]:
    """Tokens that the weights behind their label would not have chosen.

    `behind`, by the stream's index and the name of the weights: for each token how far its log-probability lies behind
    the likeliest token's. A stream that is missing there is not checked.
    """
    labels = Labels(history)
    found = []
    for i, scores in behind.items():
        stream = history.streams[i]
        for position, (version, label) in enumerate(zip(stream.versions(), labels.of(stream), strict=True)):
            short = scores[label][position] if label is not None else math.inf
            if short > tolerance:
                better = [name for name, others in scores.items() if others[position] <= tolerance]
                text = f"token {position} of {stream.client}, version {version}, is {short:.3f} behind the likeliest "
                text += f"one of {label}; it fits {better}"
                at_s = next(d.at_s for d in stream.deltas if d.spans[-1].end > position)
                found.append(Violation("label on other weights", text, stream.life, at_s))
                break
    return found


def writes(history: History, life: int) -> list[Write]:
    """The pushes that may have been applied in a life."""
    return list(_Life(history, life).writes())


class _Life:
    def __init__(self, history: History, life: int) -> None:
        self._life = life
        self._died_s = min((at_s for dead, at_s in history.kills if dead == life), default=math.inf)
        self._operations = [o for o in history.operations if o.life == life]
        self._streams = [s for s in history.streams if s.life == life]
        self._contents = history.contents(life)
        self._windows = list(history.windows(life))
        self._frontend_kills = [kill[1:] for kill in history.frontend_kills if kill[0] == life]
        self._probes = [o for o in self._operations if o.link and o.outcome is Outcome.OK]
        self._attempts: dict[PushIntent, list[Operation]] = {}
        for operation in self._operations:
            if operation.push is not None and operation.kind in ("push", "commit"):
                self._attempts.setdefault(operation.push, []).append(operation)

    def violations(self) -> list[Violation]:
        reads, writes = list(self._reads()), list(self.writes())
        found = [*self._broken_spans(), *self._applied_twice(), *self._other_bytes()]
        inexplicable = list(self._inexplicable(reads))
        found += inexplicable
        if not inexplicable:  # which the search would complain of as well
            wrong = contradiction(reads, writes)
            if wrong is not None:
                text = f"{wrong.operation}; served may be {wrong.possible}"
                found.append(self._violation("not linearizable", text, wrong.at_s))
        return [*found, *self._went_back(), *self._in_a_pause(), *self._failures()]

    def _violation(self, kind: str, text: str, at_s: float) -> Violation:
        return Violation(kind, text, self._life, at_s)

    def _broken_spans(self) -> Iterator[Violation]:
        for stream in self._streams:
            told, position = [], 0
            for delta in stream.deltas:
                end = position + delta.num_tokens
                bounds = [(span.start, span.end) for span in delta.spans]
                starts, ends = [position, *(e for _, e in bounds)], [*(s for s, _ in bounds), end]
                if starts != ends or any(s >= e for s, e in bounds):
                    text = f"{stream.client}: spans {bounds} of tokens [{position}, {end})"
                    yield self._violation("broken spans", text, delta.at_s)
                told += [span.version for span in delta.spans for _ in range(span.start, span.end)]
                position = end
            final = [span.version for span in stream.final_spans for _ in range(span.start, span.end)]
            if stream.finish and final != told:
                text = f"{stream.client}: the finish says {stream.final_spans}, which is not what came before"
                yield self._violation("broken spans", text, stream.deltas[-1].at_s if stream.deltas else 0.0)

    def _failures(self) -> Iterator[Violation]:
        for operation in self._operations:
            lives = operation.responded_s < self._died_s and not self._is_killed(operation, operation.responded_s)
            if operation.reason in ("INTERNAL", "BROKEN") and lives:
                text = f"{operation.kind} of {operation.client}: {operation.reason}"
                yield self._violation("internal error", text, operation.responded_s)
        for stream in self._streams:
            died = self._died_s < stream.error_s or self._is_killed(stream, stream.error_s)
            broke = stream.error in ("UNAVAILABLE", "ENGINE_DEAD", "BROKEN") and died
            refused = stream.error == "ENGINE_TAINTED" and not stream.deltas
            if stream.error and not broke and not refused:
                yield self._violation("stream failed", f"{stream.client}: {stream.error}", stream.error_s)
            if stream.finish == "aborted":
                at_s = stream.deltas[-1].at_s if stream.deltas else stream.invoked_s
                yield self._violation("aborted by nobody", stream.client, at_s)

    def _is_killed(self, call: Operation | Stream, ended_s: float) -> bool:
        """Whether a call may have ended because a front end was killed, and had not answered a probe again when the
        call was made."""
        return any(
            before_s < ended_s and not any(after_s < p.invoked_s and p.responded_s < call.invoked_s for p in probes)
            for link, before_s, after_s in self._frontend_kills
            if call.link in (link, ANY_LINK)
            for probes in [[p for p in self._probes if p.link == link]]
        )

    def _applied_twice(self) -> Iterator[Violation]:
        for intent, attempts in self._attempts.items():
            answers: list[AppliedAnswer] = []
            known_s = min((a.responded_s for a in attempts if a.outcome is Outcome.OK), default=math.inf)
            for attempt in attempts:
                if attempt.outcome is Outcome.REFUSED and attempt.invoked_s > known_s:
                    text = f"{intent} was applied, and then answered {attempt.reason}"
                    yield self._violation("forgotten", text, attempt.responded_s)
            for attempt in attempts:
                answer = attempt.applied
                if answer is None and attempt.outcome is Outcome.OK:
                    yield self._violation("nothing told", f"{intent} was answered OK", attempt.responded_s)
                if answer is not None and answer not in answers:
                    answers.append(answer)
                    wrong = answer.active_version != intent.version
                    replaces_itself = answer.previous_version == answer.active_version and not self._renews(intent)
                    if wrong or replaces_itself or len(answers) > 1:
                        text = f"{intent} answered {answers}"
                        yield self._violation("applied twice", text, attempt.responded_s)

    def _renews(self, intent: PushIntent) -> bool:
        """Whether a push may replace its own version: forced, after another push of that version."""
        others = (other for other in self._attempts if other.push_id != intent.push_id)
        return intent.force and any(other.version == intent.version for other in others)

    def _other_bytes(self) -> Iterator[Violation]:
        for operation in self._operations:
            if operation.content and operation.served is not None:
                expected = self._contents.get(operation.served)
                if operation.content != expected:
                    text = f"version {operation.served} is {expected}, pulled was {operation.content}"
                    yield self._violation("other bytes", text, operation.responded_s)

    def _reads(self) -> Iterator[Read]:
        for operation in self._operations:
            if operation.served is not None:
                what = f"{operation.kind} of {operation.client}"
                yield Read(operation.served, operation.invoked_s, operation.responded_s, what)
        known: tuple[int, int, float] | None = None
        for window in self._windows:
            # Of tokens with one lower bound the first to arrive says it all.
            key = (id(window.stream), window.span.version, window.not_before_s)
            if key != known:
                what = f"token {window.span.start} of {window.stream.client}"
                yield Read(window.span.version, window.not_before_s, window.at_s, what)
            known = key

    def writes(self) -> Iterator[Write]:
        for intent, attempts in self._attempts.items():
            accepted = [attempt for attempt in attempts if attempt.may_apply]
            if not accepted:
                continue
            first = min((a for a in accepted if a.outcome is Outcome.OK), key=lambda a: a.responded_s, default=None)
            told = next((a.applied for a in accepted if a.applied is not None), None)
            yield Write(
                intent.push_id,
                intent.version,
                from_s=min(attempt.invoked_s for attempt in accepted),
                due_s=first.responded_s if first is not None else math.inf,
                force=intent.force,
                expected_version=intent.expected_version,
                previous_version=told.previous_version if told is not None else None,
            )

    def _inexplicable(self, reads: Sequence[Read]) -> Iterator[Violation]:
        """Labels that no order can explain, said more plainly than a search could."""
        asked_s: dict[int, float] = {0: -math.inf}
        accepted_s: dict[int, float] = {0: -math.inf}
        for intent, attempts in self._attempts.items():
            version = intent.version
            asked_s[version] = min([asked_s.get(version, math.inf), *(a.invoked_s for a in attempts)])
            accepting = [a.invoked_s for a in attempts if a.may_apply]
            accepted_s[version] = min([accepted_s.get(version, math.inf), *accepting])
        for read in reads:
            if read.version not in asked_s:
                kind = "unknown label"
            elif accepted_s[read.version] == math.inf:
                kind = "refused push seen"
            elif read.to_s < accepted_s[read.version]:
                kind = "seen too early"
            else:
                continue
            yield self._violation(kind, f"version {read.version} in {read.what}", read.to_s)

    def _went_back(self) -> Iterator[Violation]:
        forced = [w for w in self.writes() if w.force]
        for before, after in zip(self._windows, self._windows[1:], strict=False):
            if before.stream is not after.stream or after.span.version >= before.span.version:
                continue
            if not any(
                w.version <= after.span.version and w.from_s <= after.at_s and w.due_s >= before.not_before_s
                for w in forced
            ):
                text = f"{after.stream.client}: version {after.span.version} follows {before.span.version}"
                yield self._violation("went back", text, after.at_s)

    def _in_a_pause(self) -> Iterator[Violation]:
        held = [("token in a pause", *each) for each in self._held()]
        held += [("token while tainted", *each) for each in self._tainted()]
        held.sort(key=lambda each: each[1])
        reported: set[int] = set()
        for window in self._windows:
            if id(window.stream) in reported:
                continue
            for kind, from_s, to_s in held:
                if from_s > window.not_before_s:
                    break
                if window.at_s < to_s:
                    reported.add(id(window.stream))
                    text = f"token {window.span.start} of {window.stream.client}"
                    yield self._violation(kind, text, window.at_s)
                    break

    def _held(self) -> Iterator[tuple[float, float]]:
        """When a lease surely was held."""
        resumes = [o for o in self._operations if o.kind == "resume"]
        for pause in self._operations:
            if pause.kind != "pause" or pause.outcome is not Outcome.OK:
                continue
            released = [o.invoked_s for o in resumes if o.force or o.lease_id == pause.lease_id]
            until_s = pause.invoked_s + (pause.ttl_s if pause.ttl_s is not None else math.inf)
            for renewal in self._operations:
                renews = renewal.kind == "renew" and renewal.lease_id == pause.lease_id
                if renews and renewal.outcome is Outcome.OK and renewal.ttl_s is not None:
                    until_s = max(until_s, renewal.invoked_s + renewal.ttl_s)
                elif renews and renewal.outcome is Outcome.UNKNOWN:  # it may have made the lease shorter
                    released.append(renewal.invoked_s)
            # A force that was under way when the pause was granted may have ended it at once.
            under_way = [o for o in resumes if o.force and o.invoked_s < pause.responded_s < o.responded_s]
            later = [each for each in released if each >= pause.invoked_s]
            to_s = min([until_s, *later])
            if not under_way and to_s > pause.responded_s:
                yield pause.responded_s, to_s

    def _tainted(self) -> Iterator[tuple[float, float]]:
        """When the live weights surely were in doubt."""
        attempts = [attempt for several in self._attempts.values() for attempt in several]
        for failed in attempts:
            if failed.reason != "ENGINE_TAINTED":
                continue
            others = [a for a in attempts if a is not failed and a.responded_s > failed.responded_s]
            to_s = min((a.invoked_s for a in others), default=math.inf)
            if to_s > failed.responded_s:
                yield failed.responded_s, to_s
