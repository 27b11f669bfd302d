"""What a history of a fleet has to satisfy: many replicas that serve only versions that were committed. Pure.

A fleet commits a version on all replicas at nearly the same time, not at one moment. So it is not one register. What is
checked is what its users rely on, of the versions of the weights and of those of adapters (see `fleet_registers`):

- *unknown label*: tokens of a version that nobody pushed;
- *refused label*: tokens of a version of which every push was refused;
- *canary served*: tokens of a version that somebody has brought to one replica alone, in a request that began after the
  router can have heard of it; unless it was on a disk when all processes died: then nobody knows any more that it was
  not that of the fleet;
- *too early*: tokens of a version that had not been asked for when they arrived;
- *stale*: a request that began after a write was answered with success has tokens of a version before that. A write is
  a push, a rollback, or the death of all processes, after which the fleet has what one of the disks had;
- *went back*: within a stream a version follows one that was written later, whichever number is higher;
- *wrong version told*: an answer names a version that was not served meanwhile;
- *rolled back to nothing*: a rollback is answered with a version that the fleet has not served before;
- *broken spans*: the spans of a message do not cover its tokens, or those of the finish do not repeat them;
- *token in a pause*, *token in a sleep*: a stream has tokens while it was granted, and nobody had asked for its end: at
  once if the stream began after the grant, and otherwise after what may have been on its way;
- *no adapter*, *unasked adapter*: a request that names an adapter has tokens without one, or the other way round;
- *stale adapter*: the same as stale. An adapter is written with a push, a load and an unload; and the one before is
  over if no replica was away meanwhile, because nobody promises to bring it to one that was;
- *hang*, *internal error*: a call ended at its deadline, which is above all that a fleet waits for, or with an error
  that nobody foresaw.

Whether the labels are true, `history_model.label_violations` tells.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from tests.faults.fleet_registers import FleetRegister, FleetWrite
from tests.faults.history import History, Operation, Outcome, Stream
from tests.faults.history_model import Violation
from tests.support import patience

ON_ITS_WAY_S = 3.0 * patience.SCALE
"""What a token takes at most from a replica to a client that waits for it, and a report to the router."""
_READS = ("pause", "resume", "sleep", "wake", "wake weights", "status")
_HELD = {"pause": "resume", "sleep": "wake"}


def fleet_violations(history: History) -> list[Violation]:
    """Everything that is wrong, but for labels on other weights."""
    fleet = _Fleet(history)
    found = [*fleet.answers()]
    for stream in history.streams:
        found += fleet.of_stream(stream)
    return found


class _Fleet:
    def __init__(self, history: History) -> None:
        self._operations = history.operations
        self._ended_s = _ended_s(history.operations)
        self._weights = FleetRegister(self._written())
        pushes = [operation.push for operation in history.operations if operation.push is not None]
        self._asked = {push.version for push in pushes}
        self._canaries = {o.push.version: o for o in history.operations if o.kind == "canary" and o.push is not None}
        names = {operation.lora_name for operation in history.operations if operation.lora_name}
        self._adapters = {name: FleetRegister(self._adapted(name)) for name in names}
        self._loaded = {operation.lora_name for operation in history.operations if operation.kind == "load_lora"}
        self._holds = [*self._held()]

    def of_stream(self, stream: Stream) -> Iterator[Violation]:
        """What is wrong with one."""
        yield from _broken_spans(stream)
        yield from self._labels(stream, self._weights, lambda span: span.version, "", self._running_canaries(stream))
        if stream.lora_name:
            register = self._adapters.get(stream.lora_name, FleetRegister(()))
            yield from self._labels(stream, register, self._lora_version(stream.lora_name), " adapter")
        for delta in stream.deltas:
            for span in delta.spans:
                if bool(span.lora_version) is not bool(stream.lora_name):
                    kind = "no adapter" if stream.lora_name else "unasked adapter"
                    yield _found(kind, stream, f"version {span.lora_version} of {stream.lora_name!r}", delta.at_s)
        yield from self._in_a_hold(stream)
        if stream.error == "DEADLINE_EXCEEDED":
            yield _found("hang", stream, "it ended at its deadline", stream.error_s)
        elif stream.error in ("INTERNAL", "BROKEN"):
            yield _found("internal error", stream, stream.error, stream.error_s)

    def _running_canaries(self, stream: Stream) -> dict[int, float]:
        """Versions that may reach a stream which runs on the replica that got them, and from when on."""
        return {
            version: canary.invoked_s
            for version, canary in self._canaries.items()
            if canary.outcome is not Outcome.REFUSED and stream.invoked_s <= self._ended_s[id(canary)] + ON_ITS_WAY_S
        }

    def _lora_version(self, name: str) -> Callable[..., int]:
        """Each replica counts by itself what it has loaded from a directory."""
        return (lambda span: min(span.lora_version, 1)) if name in self._loaded else (lambda span: span.lora_version)

    def _labels(
        self,
        stream: Stream,
        register: FleetRegister,
        version_of: Callable[..., int],
        what: str,
        alone_s: Mapping[int, float] = MappingProxyType({}),
    ) -> Iterator[Violation]:
        seen: list[int] = []
        for delta in stream.deltas:
            for span in delta.spans:
                version = version_of(span)
                if seen[-1:] == [version] or alone_s.get(version, math.inf) <= delta.at_s:
                    continue
                seen.append(version)
                if not register.may_be(version, stream.invoked_s, delta.at_s):
                    kind = self._why_not(register, version, delta.at_s, is_weights=not what)
                    yield _found(kind + what, stream, f"version {version}", delta.at_s)
                elif register.goes_back(seen, stream.invoked_s, delta.at_s):
                    yield _found("went back" + what, stream, f"versions {seen}", delta.at_s)

    def _why_not(self, register: FleetRegister, version: int, at_s: float, *, is_weights: bool) -> str:
        asked_s = register.asked_s(version)
        if asked_s <= at_s:
            return "stale"
        if asked_s < math.inf:
            return "too early"
        if is_weights and version in self._canaries:
            return "canary served"
        return "refused label" if is_weights and version in self._asked else "unknown label"

    def answers(self) -> Iterator[Violation]:
        """What is wrong with the answers of calls."""
        for operation in self._operations:
            if operation.reason == "INTERNAL" or operation.reason == "BROKEN":
                yield _of(operation, "internal error", operation.reason)
            if operation.reason == "DEADLINE_EXCEEDED":
                yield _of(operation, "hang", "it ended at its deadline")
            if operation.outcome is not Outcome.OK:
                continue
            version, from_s, to_s = operation.served, operation.invoked_s, operation.responded_s
            if operation.kind in _READS and version is not None and not self._weights.may_be(version, from_s, to_s):
                yield _of(operation, "wrong version told", f"version {version}")
            if operation.kind == "rollback" and not self._was_there(operation):
                yield _of(operation, "rolled back to nothing", f"to {operation.applied}")

    def _was_there(self, rollback: Operation) -> bool:
        """Whether what it has brought is of a write before it."""
        if rollback.applied is None:
            return False
        return rollback.applied.active_version in FleetRegister(self._written(before=rollback)).values() - {0}

    def _written(self, before: Operation | None = None) -> Iterator[FleetWrite]:
        """The writes of the weights, in their order."""
        known: set[int] = set()
        for operation in self._operations:
            if operation is before:
                return
            if operation.kind not in ("push", "rollback", "death") or operation.outcome is Outcome.REFUSED:
                continue
            if operation.push is not None:
                values = frozenset({operation.push.version})
            elif operation.kind == "death":
                values = operation.kept
            elif operation.applied is not None:
                values = frozenset({operation.applied.active_version})
            else:  # nobody knows to which one
                values = frozenset(known)
            known |= values
            yield self._write(operation, values, settles=True)

    def _adapted(self, name: str) -> Iterator[FleetWrite]:
        """The same of an adapter; 0 = none."""
        for operation in self._operations:
            if operation.kind == "death":
                yield self._write(operation, frozenset({0}), settles=True)
            elif operation.lora_name == name and operation.outcome is not Outcome.REFUSED:
                version = {"push_lora": operation.lora_version, "load_lora": 1, "unload_lora": 0}[operation.kind]
                yield self._write(operation, frozenset({version}), settles=operation.is_everywhere)

    def _write(self, operation: Operation, values: frozenset[int], *, settles: bool) -> FleetWrite:
        settled_s = operation.responded_s if settles and operation.outcome is Outcome.OK else math.inf
        return FleetWrite(values, operation.invoked_s, self._ended_s[id(operation)], settled_s)

    def _held(self) -> Iterator[tuple[str, float, float]]:
        """When nothing may be sampled."""
        for hold in self._operations:
            if hold.kind not in _HELD or hold.outcome is not Outcome.OK:
                continue
            ends = [
                each.invoked_s
                for each in self._operations
                if each.kind in (_HELD[hold.kind], "death")
                and each.lease_id in ("", hold.lease_id)
                and each.invoked_s >= hold.invoked_s
            ]
            if hold.ttl_s is not None:
                ends.append(hold.invoked_s + hold.ttl_s)
            yield hold.kind, hold.responded_s, min(ends, default=math.inf)

    def _in_a_hold(self, stream: Stream) -> Iterator[Violation]:
        for kind, from_s, to_s in self._holds:
            since_s = from_s if from_s <= stream.invoked_s else from_s + ON_ITS_WAY_S
            at_s = next((delta.at_s for delta in stream.deltas if since_s < delta.at_s < to_s), None)
            if at_s is not None:
                yield _found(f"token in a {kind}", stream, f"granted {at_s - from_s:.1f} s before", at_s)


def _ended_s(operations: Sequence[Operation]) -> dict[int, float]:
    """When each was over for its client, who makes one call after the other."""
    ended_s: dict[int, float] = {}
    next_s: dict[str, float] = {}
    for operation in reversed(operations):
        ended_s[id(operation)] = min(operation.responded_s, next_s.get(operation.client, math.inf))
        next_s[operation.client] = operation.invoked_s
    return ended_s


def _broken_spans(stream: Stream) -> Iterator[Violation]:
    position = 0
    for delta in stream.deltas:
        end = position + delta.num_tokens
        if not delta.spans or delta.spans[0].start != position or delta.spans[-1].end != end:
            yield _found("broken spans", stream, f"tokens {position} to {end} have {delta.spans}", delta.at_s)
        position = end
    if stream.final_spans:
        told = [span.version for span in stream.final_spans for _ in range(span.start, span.end)]
        if told != stream.versions():
            yield _found("broken spans", stream, f"the finish has {stream.final_spans}", stream.deltas[-1].at_s)


def _found(kind: str, stream: Stream, text: str, at_s: float) -> Violation:
    return Violation(kind, f"{stream.client}: {text}", stream.life, at_s)


def _of(operation: Operation, kind: str, text: str) -> Violation:
    return Violation(kind, f"{operation.kind} of {operation.client}: {text}", operation.life, operation.responded_s)
