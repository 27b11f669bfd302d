"""What a history of a fleet has to satisfy: many replicas that serve only versions that were committed. Pure.

A fleet commits a version on all replicas at nearly the same time, not at one moment. So it is not one register. What is
checked is what its users rely on:

- *unknown label*: tokens of a version that nobody pushed;
- *refused label*: tokens of a version of which every push was refused;
- *too early*: tokens of a version that had not been asked for when they arrived;
- *stale*: a request that began after a push was answered with success has tokens of an older version;
- *went back*: within a stream a lower version follows a higher one;
- *broken spans*: the spans of a message do not cover its tokens, or those of the finish do not repeat them;
- *token in a pause*: a stream that began after a pause of the fleet was granted has tokens before anybody resumed.

Whether the labels are true, `history_model.label_violations` tells. Versions are never pushed with `force` here.
"""

import math
from collections.abc import Iterator

from tests.faults.history import History, Outcome, Stream
from tests.faults.history_model import Violation


def fleet_violations(history: History) -> list[Violation]:
    """Everything that is wrong, but for labels on other weights."""
    pushes = [operation for operation in history.operations if operation.push is not None]
    asked_s: dict[int, float] = {0: -math.inf}
    may_be_served = {0}
    committed_s: dict[int, float] = {0: -math.inf}
    for operation in pushes:
        assert operation.push is not None
        version = operation.push.version
        asked_s[version] = min(asked_s.get(version, math.inf), operation.invoked_s)
        if operation.outcome is not Outcome.REFUSED:
            may_be_served.add(version)
        if operation.outcome is Outcome.OK:
            committed_s[version] = min(committed_s.get(version, math.inf), operation.responded_s)
    found: list[Violation] = []
    for stream in history.streams:
        least = max(version for version, at_s in committed_s.items() if at_s <= stream.invoked_s)
        found += _of_stream(stream, asked_s, may_be_served, least)
        found += _pauses(history, stream)
    return found


def _of_stream(stream: Stream, asked_s: dict[int, float], may_be_served: set[int], least: int) -> Iterator[Violation]:
    position, highest = 0, -1
    for delta in stream.deltas:
        end = position + delta.num_tokens
        if not delta.spans or delta.spans[0].start != position or delta.spans[-1].end != end:
            yield _found("broken spans", stream, f"tokens {position} to {end} have {delta.spans}", delta.at_s)
        position = end
        for span in delta.spans:
            version = span.version
            if version not in asked_s:
                yield _found("unknown label", stream, f"version {version}", delta.at_s)
            elif version not in may_be_served:
                yield _found("refused label", stream, f"version {version} was refused", delta.at_s)
            elif delta.at_s < asked_s[version]:
                yield _found("too early", stream, f"version {version} had not been pushed", delta.at_s)
            if version < least:
                yield _found("stale", stream, f"version {version} after {least} was committed", delta.at_s)
            if version < highest:
                yield _found("went back", stream, f"version {version} after {highest}", delta.at_s)
            highest = max(highest, version)
    if stream.final_spans:
        told = [span.version for span in stream.final_spans for _ in range(span.start, span.end)]
        if told != stream.versions():
            yield _found("broken spans", stream, f"the finish has {stream.final_spans}", stream.deltas[-1].at_s)


def _pauses(history: History, stream: Stream) -> Iterator[Violation]:
    for pause in history.operations:
        if pause.kind != "pause" or pause.outcome is not Outcome.OK or pause.responded_s > stream.invoked_s:
            continue
        until_s = min(
            (
                each.invoked_s
                for each in history.operations
                if each.kind == "resume" and each.lease_id == pause.lease_id
            ),
            default=math.inf,
        )
        if pause.ttl_s is not None:
            until_s = min(until_s, pause.invoked_s + pause.ttl_s)
        for delta in stream.deltas:
            if delta.at_s < until_s:
                yield _found("token in a pause", stream, f"lease {pause.lease_id}", delta.at_s)
                break


def _found(kind: str, stream: Stream, text: str, at_s: float) -> Violation:
    return Violation(kind, f"{stream.client}: {text}", stream.life, at_s)
