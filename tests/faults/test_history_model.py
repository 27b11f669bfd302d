"""The model of histories finds what is wrong, and accepts what may be: hand-written histories, one for each rule.

Times are in seconds from 0. Two pushes: version 5 from 1 to 2, version 6 from 3 to 4.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from genserve.rpc.streams.turns import LONGEST_REST_S
from tests.faults.history import (
    START_CONTENT,
    AppliedAnswer,
    Delta,
    History,
    Operation,
    Outcome,
    PushIntent,
    Span,
    Stream,
    excerpt,
)
from tests.faults.history_model import label_violations, violations
from tests.faults.linearizability import Read, Write, contradiction

FIVE, SIX = PushIntent("p5", 5, "b"), PushIntent("p6", 6, "c")


def ok(intent: PushIntent, previous: int, from_s: float, to_s: float, **fields: Any) -> Operation:
    """An attempt that was answered with success."""
    applied = AppliedAnswer(previous, intent.version, fields.pop("detail", ""))
    fields = {"kind": "push", "served": intent.version, **fields}
    return attempt(intent, from_s, to_s, outcome=Outcome.OK, applied=applied, **fields)


def attempt(intent: PushIntent, from_s: float, to_s: float = math.inf, **fields: Any) -> Operation:
    """An attempt whose outcome is unknown, unless `fields` say more."""
    fields = {"kind": "push", "outcome": Outcome.UNKNOWN, **fields}
    return Operation(client="trainer", life=0, invoked_s=from_s, responded_s=to_s, push=intent, **fields)


def refused(intent: PushIntent, from_s: float, to_s: float, reason: str = "PUSH_ROLLED_BACK") -> Operation:
    """An attempt that was answered with an error of the kind that applies nothing."""
    return attempt(intent, from_s, to_s, outcome=Outcome.REFUSED, reason=reason)


def call(kind: str, from_s: float, to_s: float, **fields: Any) -> Operation:
    """A call that was answered."""
    return Operation(kind, "client", 0, from_s, to_s, Outcome.OK, **fields)


def probes(*times_s: float) -> list[Operation]:
    """Probes of 10 ms on the streams' link."""
    return [call("status", at_s, at_s + 0.01, link="tokens") for at_s in times_s]


def silence(from_s: float) -> list[Operation]:
    """Probes until nothing that waited in the daemon at `from_s` is on its way any more."""
    return probes(from_s, from_s + 0.01 + LONGEST_REST_S, from_s + 0.03 + LONGEST_REST_S)


def rounds(from_s: float, to_s: float, count: int = 20, link: str = "front end 0") -> list[Operation]:
    """Probes one after the other on the connection to a front end."""
    step_s = (to_s - from_s) / count
    return [call("tokenize", from_s + n * step_s, from_s + (n + 0.9) * step_s, link=link) for n in range(count)]


def stream(from_s: float, *tokens: tuple[float, int], link: str = "tokens", **fields: Any) -> Stream:
    """One token a message: when it arrived, and its label."""
    made = Stream("generator", 0, from_s, link, [1, 2], **fields)
    for i, (at_s, version) in enumerate(tokens):
        made.tokens.append(i)
        made.deltas.append(Delta(at_s, 1, (Span(version, i, i + 1),)))
    return made


def kinds(operations: Sequence[Operation], *streams: Stream, died_s: float | None = None) -> list[str]:
    """What the model says is wrong."""
    history = History(list(operations), list(streams), [] if died_s is None else [(0, died_s)])
    found = violations(history)
    for violation in found:
        assert "the violation" in violation.describe(history)
    return [violation.kind for violation in found]


PUSHES = [ok(FIVE, 0, 1.0, 2.0), ok(SIX, 5, 3.0, 4.0)]


def test_a_correct_history_is_accepted() -> None:
    """Streams live across pushes, and see each version at its time."""
    operations = [*PUSHES, *probes(0.5, 1.2, 2.5, 3.5, 4.5), call("weights", 2.2, 2.3, served=5)]
    assert kinds(operations, stream(0.1, (0.2, 0), (0.9, 0), (1.5, 5), (2.9, 5), (3.2, 6), (5.0, 6))) == []


def test_a_version_that_nobody_pushed_is_found() -> None:
    assert kinds(PUSHES, stream(0.1, (0.5, 0), (2.5, 7))) == ["unknown label"]
    assert kinds([*PUSHES, call("weights", 2.5, 2.6, served=7)]) == ["unknown label"]


def test_a_token_labelled_before_its_push_began_is_found() -> None:
    assert kinds(PUSHES, stream(0.1, (0.9, 5), (2.0, 5))) == ["seen too early"]


def test_a_refused_push_that_is_seen_is_found() -> None:
    operations = [refused(FIVE, 1.0, 2.0)]
    assert kinds(operations, stream(0.1, (0.5, 0), (2.5, 5))) == ["refused push seen"]
    assert kinds([*operations, call("status", 2.5, 2.6, served=5)]) == ["refused push seen"]
    assert kinds([*operations, ok(FIVE, 0, 3.0, 4.0)], stream(0.1, (2.5, 5))) == ["seen too early"]
    assert kinds([*operations, ok(FIVE, 0, 2.0, 4.0)], stream(0.1, (2.5, 5))) == []


def test_unknown_outcome_push_may_appear_late_or_never_but_not_vanish() -> None:
    """Its client went away at 1.1; the daemon may carry it out much later."""
    operations = [attempt(FIVE, 1.0)]
    assert kinds(operations, stream(0.1, (1.5, 0), (9.0, 0))) == []
    assert kinds([*operations, *silence(2.0)], stream(0.1, (1.5, 0), (9.0, 5))) == []
    reads = [call("weights", t, t + 0.1, served=v) for t, v in ((2.0, 0), (3.0, 5), (4.0, 0))]
    assert kinds([*operations, *reads]) == ["not linearizable"]


def test_token_of_a_version_replaced_before_its_request_is_found() -> None:
    assert kinds(PUSHES, stream(4.1, (4.5, 5))) == ["not linearizable"]
    assert kinds(PUSHES, stream(3.9, (4.5, 5))) == []


def test_a_token_of_a_version_that_was_replaced_before_a_silence_is_found() -> None:
    """The stream began long ago; that nothing was on its way is known from the probes, if it was silent meanwhile."""
    before, late = (2.5, 5), (5.0, 5)
    assert kinds(PUSHES, stream(2.1, before, late)) == []
    assert kinds([*PUSHES, *silence(4.2)], stream(2.1, before, late)) == ["not linearizable"]
    assert kinds([*PUSHES, *silence(3.9)], stream(2.1, before, late)) == []
    assert kinds([*PUSHES, *silence(4.2)], stream(2.1, before, (4.205, 5), late)) == []
    assert kinds([*PUSHES, *silence(4.2)], stream(2.1, before, late, immediate=False)) == []
    too_soon, still_unread = probes(4.2, 4.25, 4.27), probes(4.2, 4.32)
    assert kinds([*PUSHES, *too_soon], stream(2.1, before, late)) == []  # it may have waited for its turn
    assert kinds([*PUSHES, *still_unread], stream(2.1, before, late)) == []  # it may have come with the last answer


@pytest.mark.parametrize(
    ("around", "link", "found"),
    [
        (rounds(4.1, 5.9), "front end 0", ["not linearizable"]),
        (rounds(3.9, 5.9), "front end 0", []),  # the first one may have gone round before the push was answered
        (rounds(4.1, 5.9, 19), "front end 0", []),
        (rounds(4.6, 5.9), "front end 0", []),  # too short a time
        (rounds(4.1, 5.9), "front end 1", []),
        (rounds(4.1, 5.9), "any", []),
        (rounds(4.1, 5.9, link="tokens"), "tokens", ["not linearizable"]),
    ],
)
def test_a_token_that_comes_after_many_rounds_is_late(around: list[Operation], link: str, found: list[str]) -> None:
    """Of its connection, whether the stream was silent or not."""
    tokens = [(2.5, 5), (5.8, 5), (6.0, 5)]
    assert kinds([*PUSHES, *around], stream(2.1, *tokens, link=link)) == found
    assert kinds([*PUSHES, *around], stream(2.1, *tokens, link=link, immediate=False)) == []


def test_a_stream_that_ended_as_aborted_is_found() -> None:
    spans = (Span(0, 0, 1),)
    assert kinds([], stream(0.1, (0.5, 0), finish="aborted", final_spans=spans)) == ["aborted by nobody"]
    assert kinds([], stream(0.1, (0.5, 0), finish="paused", final_spans=spans)) == []


@pytest.mark.parametrize(
    ("from_s", "link", "found"),
    [
        (0.5, "front end 0", []),
        (1.2, "front end 0", []),  # nothing answers there yet
        (1.2, "any", []),
        (0.5, "front end 1", ["stream failed"]),
        (2.1, "front end 0", ["stream failed"]),  # it had answered
        (2.1, "any", ["stream failed"]),
        (0.5, "tokens", ["stream failed"]),
    ],
)
def test_a_stream_may_end_with_its_front_end(from_s: float, link: str, found: list[str]) -> None:
    """Killed at 1, and back at 2."""
    broken = stream(from_s, link=link, error="UNAVAILABLE", error_s=2.5)
    back = call("tokenize", 1.9, 2.0, link="front end 0")
    history = History([back], [broken], [], [(0, "front end 0", 1.0, 1.1)])
    assert [violation.kind for violation in violations(history)] == found
    assert "xx front end 0 is killed" in excerpt(history, 0, 1.0)
    broken.error_s = 0.9
    assert [violation.kind for violation in violations(history)] == ["stream failed"]


def test_reads_that_contradict_the_pushes_are_found() -> None:
    """Also a refusal reads: it names the version that is served."""
    assert kinds([*PUSHES, call("weights", 4.1, 4.2, served=5)]) == ["not linearizable"]
    assert kinds([*PUSHES, call("weights", 2.1, 2.2, served=0)]) == ["not linearizable"]
    late = refused(PushIntent("p4", 4, "d"), 4.1, 4.2, "VERSION_NOT_NEWER")
    late.served = 5
    assert kinds([*PUSHES, late]) == ["not linearizable"]
    assert kinds([ok(FIVE, 0, 1.0, 2.0), ok(SIX, 0, 3.0, 4.0)]) == ["not linearizable"]
    expecting = PushIntent("p6", 6, "c", expected_version=4)
    assert kinds([ok(FIVE, 0, 1.0, 2.0), ok(expecting, 4, 3.0, 4.0)]) == ["not linearizable"]


def test_a_push_that_was_applied_twice_is_found() -> None:
    """By two answers that differ, by an answer that says so, or because it came back after another."""
    assert kinds([ok(FIVE, 0, 1.0, 2.0), ok(FIVE, 0, 2.5, 2.6)]) == []
    assert kinds([ok(FIVE, 0, 1.0, 2.0), ok(FIVE, 0, 2.5, 2.6, detail="in another time")]) == ["applied twice"]
    assert "applied twice" in kinds([ok(FIVE, 0, 1.0, 2.0), ok(FIVE, 5, 2.5, 2.6)])
    repeated = ok(FIVE, 0, 5.0, 6.0, served=6)
    assert kinds([*PUSHES, repeated, call("weights", 6.1, 6.2, served=6)]) == []
    assert kinds([*PUSHES, repeated, call("weights", 6.1, 6.2, served=5)]) == ["not linearizable"]
    again = PushIntent("p9", FIVE.version, FIVE.content, force=True)
    assert kinds([ok(FIVE, 0, 1.0, 2.0), ok(again, 5, 3.0, 4.0)]) == []  # another push of the version that is live
    assert "applied twice" in kinds([ok(again, 5, 3.0, 4.0)])


def test_a_repeat_that_is_refused_after_its_push_was_applied_is_found() -> None:
    again = refused(FIVE, 2.5, 2.6, "VERSION_NOT_NEWER")
    assert kinds([ok(FIVE, 0, 1.0, 2.0), again]) == ["forgotten"]
    assert kinds([again, ok(FIVE, 0, 1.0, 2.55)]) == []


def test_a_stream_that_goes_back_is_found_unless_a_push_was_forced() -> None:
    assert kinds(PUSHES, stream(0.1, (3.5, 6), (3.6, 5))) == ["went back"]
    forced = PushIntent("p3", 3, "d", force=True)
    assert kinds([*PUSHES, ok(forced, 6, 5.0, 6.0)], stream(0.1, (3.5, 6), (5.5, 3))) == []
    assert kinds([*PUSHES, refused(forced, 5.0, 6.0)], stream(0.1, (3.5, 6), (3.6, 5))) == ["went back"]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], ["token in a pause"]),
        ([call("resume", 2.9, 3.0, lease_id="other")], ["token in a pause"]),
        ([call("resume", 2.9, 3.0, lease_id="L")], []),
        ([call("resume", 2.9, 3.0, force=True)], []),
        ([call("resume", 0.9, 3.0, force=True)], []),
    ],
    ids=["held", "resumed by a stranger", "resumed", "resumed by force", "by one that was under way"],
)
def test_a_token_that_was_sampled_in_a_pause_is_found(others: list[Operation], expected: list[str]) -> None:
    """Surely within it: a probe went round in silence after the pause was answered."""
    pause = call("pause", 1.0, 1.1, lease_id="L", ttl_s=9.0)
    assert kinds([pause, *silence(1.2), *others], stream(0.1, (0.9, 0), (3.5, 0))) == expected


def test_a_token_on_its_way_when_the_pause_was_answered_is_accepted() -> None:
    pause = call("pause", 1.0, 1.1, lease_id="L", ttl_s=9.0)
    assert kinds([pause, *silence(1.2)], stream(0.1, (0.9, 0), (1.205, 0))) == []
    assert kinds([pause, *silence(1.05)], stream(0.1, (0.9, 0), (1.205, 0))) == []


def test_a_pause_ends_with_its_time_to_live_unless_it_was_renewed() -> None:
    pause = call("pause", 1.0, 1.1, lease_id="L", ttl_s=2.0)
    renewal = call("renew", 2.5, 2.6, lease_id="L", ttl_s=2.0)
    late = stream(0.1, (0.9, 0), (3.5, 0))
    assert kinds([pause, *silence(1.2)], late) == []
    assert kinds([pause, *silence(1.2), renewal], late) == ["token in a pause"]


def test_a_token_sampled_while_the_weights_were_in_doubt_is_found() -> None:
    failed = refused(FIVE, 1.0, 2.0, "ENGINE_TAINTED")
    assert kinds([failed, *silence(2.1)], stream(0.1, (0.9, 0), (2.5, 0))) == ["token while tainted"]
    healed = ok(SIX, 0, 2.2, 2.9)
    assert kinds([failed, *silence(2.1), healed], stream(0.1, (0.9, 0), (2.5, 6))) == []


def test_bytes_that_were_not_pushed_are_found_when_they_are_pulled() -> None:
    assert kinds([*PUSHES, call("pull", 2.2, 2.3, served=5, content="b")]) == []
    assert kinds([*PUSHES, call("pull", 2.2, 2.3, served=5, content="b/c")]) == ["other bytes"]


def test_a_success_that_does_not_say_what_was_applied_is_found() -> None:
    silent = ok(FIVE, 0, 1.0, 2.0)
    silent.applied = None
    assert kinds([silent, call("weights", 2.1, 2.2, served=5)]) == ["nothing told"]
    assert kinds([silent, call("weights", 2.1, 2.2, served=0)]) == ["nothing told", "not linearizable"]


def test_an_internal_error_is_found_unless_the_daemon_died() -> None:
    failed = call("pull", 2.2, 2.3, reason="INTERNAL")
    failed.outcome = Outcome.UNKNOWN
    assert kinds([failed]) == kinds([failed], died_s=3.0) == ["internal error"]
    assert kinds([failed], died_s=2.2) == []


def test_spans_that_do_not_cover_the_tokens_are_found() -> None:
    gap, told_otherwise = stream(0.1, (0.5, 0), (0.6, 0)), stream(0.1, (0.5, 0), (0.6, 0))
    gap.deltas[1] = Delta(0.6, 2, (Span(0, 1, 2),))
    told_otherwise.finish, told_otherwise.final_spans = "length", (Span(0, 0, 1), Span(5, 1, 2))
    assert kinds(PUSHES, gap) == kinds(PUSHES, told_otherwise) == ["broken spans"]


def test_a_stream_that_fails_is_found_unless_the_daemon_died_or_refused_it() -> None:
    broken = stream(0.1, (0.5, 0), error="UNAVAILABLE", error_s=0.8)
    assert kinds([], broken) == kinds([], broken, died_s=0.9) == ["stream failed"]
    assert kinds([], broken, died_s=0.6) == []
    assert kinds([], stream(0.1, (0.5, 0), error="INTERNAL", error_s=0.8), died_s=0.6) == ["stream failed"]
    assert kinds([], stream(0.1, error="ENGINE_TAINTED", error_s=0.2)) == []


def test_lives_are_judged_apart() -> None:
    """A daemon that was started again knows nothing of the pushes before."""
    later = stream(5.0, (5.5, 5))
    later.life = 1
    assert kinds(PUSHES, later) == ["unknown label"]


def test_a_label_whose_weights_do_not_fit_is_found() -> None:
    """The third token was chosen by other weights than its label says."""
    history = History(list(PUSHES), [stream(0.1, (0.5, 0), (2.5, 5), (2.6, 5))])
    right = {START_CONTENT: [0.0, 2.0, 2.0], "b": [1.0, 0.0, 0.01], "c": [3.0, 3.0, 3.0]}
    assert label_violations(history, {0: right}, tolerance=0.1) == []
    (wrong,) = label_violations(history, {0: {**right, "b": [1.0, 0.0, 0.9], "c": [3.0, 3.0, 0.0]}}, tolerance=0.1)
    assert wrong.kind == "label on other weights"
    assert "token 2 " in wrong.text and "['c']" in wrong.text


def test_an_excerpt_is_a_timeline_around_the_violation() -> None:
    shown = excerpt(History(list(PUSHES), [stream(0.1, (0.5, 0), (2.5, 5))], [(0, 9.0)]), 0, 2.5).splitlines()
    assert [line.split(" ms ")[1][:2] for line in shown] == ["->", "<-", "->", "<-", "<-", "**", "->", "<-", "xx"]
    assert "p5 version 5 (b) ok 0 -> 5" in shown[3]


@pytest.mark.parametrize("seed", range(30))
def test_the_search_accepts_what_a_register_did_and_finds_what_it_did_not(seed: int) -> None:
    """Random writes with overlapping intervals, some of unknown outcome, and reads around the moments they saw."""
    rng = random.Random(seed)
    applied, writes, version = [(0.0, 0)], [], 0
    for i in range(40):
        at_s, version = float(i + 1), version + rng.choice((1, 2))
        due_s = rng.choice((at_s + rng.uniform(0.0, 2.0), math.inf))
        writes.append(Write(f"p{version}", version, at_s - rng.uniform(0.0, 3.0), due_s))
        applied.append((at_s, version))
    reads = []
    for _ in range(200):
        at_s = rng.uniform(0.0, 41.0)
        seen = next(v for since_s, v in reversed(applied) if since_s <= at_s)
        reads.append(Read(seen, at_s - rng.uniform(0.0, 1.5), at_s + rng.uniform(0.0, 1.5)))
    assert contradiction(reads, writes) is None
    known = [write for write in writes if write.due_s < 30.0]
    replaced, by = known[0], known[-1]
    assert by.due_s > replaced.due_s
    late = Read(replaced.version, by.due_s + 0.1, 60.0, "too late")
    found = contradiction([*reads, late], writes)
    assert found is not None and found.operation is late
