"""The model of a fleet's histories finds what is wrong, and accepts what may be: hand-written histories, for each rule.

Times are in seconds from 0. Two pushes: version 5 from 1 to 2, version 6 from 3 to 4.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.fleet_model import ON_ITS_WAY_S, fleet_violations
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
)
from tests.faults.history_model import label_violations
from tests.faults.labels import Labels

FIVE, SIX = PushIntent("p5", 5, "b"), PushIntent("p6", 6, "c")


def call(kind: str, from_s: float, to_s: float, client: str = "client", **fields: Any) -> Operation:
    """A call that was answered with success, unless `fields` say more."""
    fields = {"outcome": Outcome.OK, **fields}
    return Operation(kind, client, 0, from_s, to_s, **fields)


def push(intent: PushIntent, from_s: float, to_s: float = math.inf, kind: str = "push", **fields: Any) -> Operation:
    """One that was answered with success, or whose outcome is unknown if it has no end."""
    outcome = Outcome.UNKNOWN if to_s == math.inf else Outcome.OK
    return call(kind, from_s, to_s, "trainer", **{"outcome": outcome, "push": intent, **fields})


def rollback(version: int, from_s: float, to_s: float) -> Operation:
    """To this version."""
    return call("rollback", from_s, to_s, "trainer", applied=AppliedAnswer(6, version))


def stream(from_s: float, *tokens: tuple[float, int], adapter: str = "", lora: int = 0, **fields: Any) -> Stream:
    """One token a message: when it arrived, and its label."""
    made = Stream("generator", 0, from_s, "any", [1, 2], lora_name=adapter, **fields)
    for i, (at_s, version) in enumerate(tokens):
        made.tokens.append(i)
        made.deltas.append(Delta(at_s, 1, (Span(version, i, i + 1, lora),)))
    return made


def adapted(from_s: float, *tokens: tuple[float, int]) -> Stream:
    """The same of version 0 with an adapter, whose version is in the tokens."""
    made = stream(from_s, adapter="poet")
    for i, (at_s, version) in enumerate(tokens):
        made.deltas.append(Delta(at_s, 1, (Span(0, i, i + 1, version),)))
    return made


def kinds(operations: Sequence[Operation], *streams: Stream) -> list[str]:
    """What the model says is wrong."""
    history = History(sorted(operations, key=lambda operation: operation.invoked_s), list(streams))
    found = fleet_violations(history)
    for violation in found:
        assert "the violation" in violation.describe(history)
    return [violation.kind for violation in found]


PUSHES = [push(FIVE, 1.0, 2.0), push(SIX, 3.0, 4.0)]
BACK = push(PushIntent("p3", 3, "d", force=True), 5.0, 6.0)


def test_a_correct_history_is_accepted() -> None:
    """Streams live across pushes, of which one is forced back, and replicas commit one after the other."""
    assert kinds([*PUSHES, BACK], stream(0.1, (0.2, 0), (1.1, 5), (3.5, 6), (5.5, 3)), stream(3.1, (3.8, 5))) == []


def test_a_version_that_nobody_pushed_or_that_was_refused_is_found() -> None:
    assert kinds(PUSHES, stream(0.1, (2.5, 7))) == ["unknown label"]
    refused = push(FIVE, 1.0, 2.0, outcome=Outcome.REFUSED, reason="FLEET_PUSH_FAILED")
    assert kinds([refused], stream(0.1, (2.5, 5))) == ["refused label"]
    assert kinds([refused, push(FIVE, 2.1)], stream(0.1, (2.5, 5))) == []


def test_a_version_that_comes_before_its_push_is_found() -> None:
    assert kinds(PUSHES, stream(0.1, (0.9, 5))) == ["too early"]


def test_an_older_version_in_a_request_that_began_later_is_found() -> None:
    assert kinds(PUSHES, stream(4.1, (4.2, 5))) == ["stale"]
    assert kinds(PUSHES, stream(3.9, (4.2, 5))) == []
    unknown = [push(FIVE, 1.0, 2.0), push(SIX, 3.0)]
    assert kinds(unknown, stream(9.0, (9.1, 5)), stream(9.0, (9.1, 6))) == []


def test_the_version_before_a_forced_push_is_stale_though_it_is_higher() -> None:
    assert kinds([*PUSHES, BACK], stream(6.1, (6.2, 6))) == ["stale"]
    assert kinds([*PUSHES, BACK], stream(6.1, (6.2, 3))) == []


def test_a_push_of_unknown_outcome_is_over_when_a_later_one_has_passed() -> None:
    """One is on its way at a time: this one did not come about, or before the other."""
    operations = [push(FIVE, 1.0), push(SIX, 3.0, 4.0)]
    assert kinds(operations, stream(4.1, (4.2, 5))) == ["stale"]
    assert kinds(operations, stream(0.1, (3.1, 6), (3.2, 5))) == ["went back"]


def test_a_stream_that_goes_back_is_found() -> None:
    """By the order of the writes, not of the numbers."""
    assert kinds(PUSHES, stream(0.1, (3.5, 6), (3.6, 5))) == ["went back"]
    assert kinds([*PUSHES, BACK], stream(0.1, (5.5, 3), (5.6, 6))) == ["went back"]
    again = [*PUSHES, rollback(5, 5.0, 6.0)]
    assert kinds(again, stream(0.1, (1.5, 5), (3.5, 6), (5.5, 5))) == []
    assert kinds(again, stream(0.1, (3.5, 6), (4.9, 5))) == ["went back"]
    assert kinds(again, stream(0.1, (1.5, 5), (3.5, 6), (5.5, 5), (5.6, 6))) == ["went back"]


def test_what_a_rollback_has_replaced_is_stale() -> None:
    assert kinds([*PUSHES, rollback(5, 5.0, 6.0)], stream(6.1, (6.2, 6))) == ["stale"]
    assert kinds([*PUSHES, rollback(5, 5.0, 6.0)], stream(6.1, (6.2, 5))) == []
    lost = call("rollback", 5.0, math.inf, "trainer", outcome=Outcome.UNKNOWN)
    assert kinds([*PUSHES, lost], stream(9.0, (9.1, 5)), stream(9.0, (9.1, 6))) == []


def test_a_rollback_to_what_was_never_served_is_found() -> None:
    canary = push(PushIntent("p9", 9, "d"), 4.1, 4.5, kind="canary")
    for version in (0, 7, 9):
        assert kinds([*PUSHES, canary, rollback(version, 5.0, 6.0)]) == ["rolled back to nothing"]
    assert kinds([*PUSHES, canary, rollback(5, 5.0, 6.0)]) == []


def test_a_canary_that_is_served_is_found() -> None:
    """But for requests that run on its replica. After the death of all it may be what one of the disks had."""
    canary = push(PushIntent("p2", 2, "d", force=True), 4.1, 4.5, kind="canary")
    late_s = 4.6 + ON_ITS_WAY_S
    assert kinds([*PUSHES, canary], stream(late_s, (late_s + 0.1, 2))) == ["canary served"]
    assert kinds([*PUSHES, canary], stream(3.1, (4.05, 2))) == ["canary served"]
    assert kinds([*PUSHES, canary], stream(3.1, (3.5, 6), (4.4, 2), (8.0, 2), (8.1, 6))) == []
    died = call("death", 5.0, 6.0, "disturber", kept=frozenset({2, 6}))
    assert kinds([*PUSHES, canary, died], stream(late_s, (late_s + 0.1, 2))) == []


def test_a_version_that_was_on_no_disk_when_all_died_is_found() -> None:
    """Also the last one, which may be lost."""
    died = call("death", 5.0, 6.0, "disturber", kept=frozenset({5}))
    assert kinds([*PUSHES, died], stream(6.1, (6.2, 6))) == ["stale"]
    assert kinds([*PUSHES, died], stream(6.1, (6.2, 5))) == []
    assert kinds([*PUSHES, died], stream(4.5, (5.1, 6))) == []
    kept = call("death", 5.0, 6.0, "disturber", kept=frozenset({6}))
    assert kinds([*PUSHES, kept], stream(6.1, (6.2, 5))) == ["stale"]
    assert kinds([*PUSHES, kept, push(PushIntent("p8", 8, "b"), 7.0, 8.0)], stream(6.1, (6.2, 6), (7.1, 8))) == []


def test_an_answer_that_names_another_version_is_found() -> None:
    assert kinds([*PUSHES, call("pause", 4.1, 4.2, served=5, ttl_s=0.1)]) == ["wrong version told"]
    assert kinds([*PUSHES, call("pause", 3.9, 4.2, served=5, ttl_s=0.1)]) == []
    kept = call("death", 5.0, 6.0, "disturber", kept=frozenset({6}))
    assert kinds([*PUSHES, kept, call("status", 7.0, 7.1, served=5)]) == ["wrong version told"]


def test_spans_that_do_not_cover_the_tokens_are_found() -> None:
    gap, told_otherwise = stream(0.1, (0.5, 0), (0.6, 0)), stream(0.1, (0.5, 0))
    gap.deltas[1] = Delta(0.6, 2, (Span(0, 1, 2),))
    told_otherwise.final_spans = (Span(5, 0, 1),)
    assert kinds(PUSHES, gap) == kinds(PUSHES, told_otherwise) == ["broken spans"]


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([], ["token in a pause"]),
        ([call("resume", 2.0, 2.1, lease_id="other")], ["token in a pause"]),
        ([call("resume", 2.0, 2.1, lease_id="L")], []),
        ([call("resume", 0.5, 0.6, lease_id="L")], ["token in a pause"]),
        ([call("death", 2.0, 2.1, kept=frozenset({0}))], []),
    ],
    ids=["held", "resumed by a stranger", "resumed", "resumed before", "died"],
)
def test_a_token_in_a_pause_is_found(others: list[Operation], found: list[str]) -> None:
    pause = call("pause", 1.0, 1.1, lease_id="L", ttl_s=9.0)
    assert kinds([pause, *others], stream(1.2, (2.5, 0))) == found


def test_a_token_in_a_sleep_is_found() -> None:
    """Also after parts of the memory were woken up; and of a stream that began before, unless it was on its way."""
    sleep, part, wake = call("sleep", 1.0, 1.1), call("wake weights", 2.0, 2.1), call("wake", 9.0, 9.1)
    assert kinds([sleep, part, wake], stream(1.2, (2.5, 0))) == ["token in a sleep"]
    assert kinds([sleep, wake], stream(1.2, (9.01, 0))) == []
    late_s = 1.2 + ON_ITS_WAY_S
    assert kinds([sleep, wake], stream(0.5, (0.9, 0), (late_s, 0))) == ["token in a sleep"]
    assert kinds([sleep, wake], stream(0.5, (0.9, 0), (1.2, 0))) == []
    assert kinds([call("sleep", 1.0, 1.1, outcome=Outcome.UNKNOWN)], stream(1.2, (2.5, 0))) == []


def poet(version: int, from_s: float, to_s: float, **fields: Any) -> Operation:
    """A push of an adapter."""
    return call("push_lora", from_s, to_s, "operator", lora_name="poet", lora_version=version, adapter="x", **fields)


def unload(from_s: float, to_s: float, **fields: Any) -> Operation:
    """Of the adapter."""
    return call("unload_lora", from_s, to_s, "operator", lora_name="poet", **fields)


def test_a_request_gets_the_adapter_that_it_names() -> None:
    assert kinds([poet(1, 1.0, 2.0)], adapted(1.5, (1.6, 1))) == []
    assert kinds([poet(1, 1.0, 2.0)], stream(2.5, (2.6, 0), lora=1)) == ["unasked adapter"]
    assert "no adapter" in kinds([poet(1, 1.0, 2.0)], adapted(2.5, (2.6, 0)))
    assert kinds([poet(1, 1.0, 2.0)], adapted(0.5, (0.6, 1))) == ["too early adapter"]
    assert kinds([poet(1, 1.0, 2.0)], adapted(2.5, (2.6, 2))) == ["unknown label adapter"]


def test_an_adapter_that_was_replaced_on_all_replicas_is_stale() -> None:
    """Or unloaded. A replica that was away keeps what it had."""
    first = poet(1, 1.0, 2.0)
    for later in (poet(2, 3.0, 4.0, is_everywhere=True), unload(3.0, 4.0, is_everywhere=True)):
        assert kinds([first, later], adapted(4.1, (4.2, 1))) == ["stale adapter"]
        assert kinds([first, later], adapted(3.5, (4.2, 1))) == []
    assert kinds([first, poet(2, 3.0, 4.0)], adapted(4.1, (4.2, 1))) == []
    assert kinds([first, poet(2, 3.0, 4.0)], adapted(2.5, (3.2, 2), (3.3, 1))) == ["went back adapter"]
    died = call("death", 5.0, 6.0, "disturber", kept=frozenset({0}))
    assert kinds([first, died], adapted(6.1, (6.2, 1))) == ["stale adapter"]


def test_an_adapter_from_a_directory_has_any_number() -> None:
    load = call("load_lora", 1.0, 2.0, "operator", lora_name="poet", adapter="w")
    assert kinds([load], adapted(2.1, (2.2, 1)), adapted(2.1, (2.2, 3))) == []
    assert kinds([load, unload(3.0, 4.0, is_everywhere=True)], adapted(4.1, (4.2, 3))) == ["stale adapter"]


def test_a_call_that_hangs_or_fails_as_nobody_foresaw_is_found() -> None:
    for reason, found in (("DEADLINE_EXCEEDED", "hang"), ("INTERNAL", "internal error"), ("BROKEN", "internal error")):
        assert kinds([], stream(0.1, error=reason, error_s=0.8)) == [found]
        assert kinds([call("pause", 1.0, 2.0, outcome=Outcome.UNKNOWN, reason=reason)]) == [found]
    assert kinds([], stream(0.1, error="REPLICA_LOST", error_s=0.8)) == []


def test_a_label_names_the_weights_with_the_adapter() -> None:
    """A token that fits the weights without it is found."""
    history = History([*PUSHES, poet(1, 1.0, 2.0)], [stream(2.5, (2.6, 5), (3.5, 6), adapter="poet", lora=1)])
    assert Labels(history).of(history.streams[0]) == ["b+x", "c+x"]
    behind = {0: {"b": [0.0, 4.0], "b+x": [0.0, 4.0], "c": [4.0, 0.0], "c+x": [4.0, 3.0], START_CONTENT: [4.0, 4.0]}}
    (wrong,) = label_violations(history, behind, tolerance=0.1)
    assert "token 1 " in wrong.text and "it fits ['c']" in wrong.text
    behind[0]["c+x"] = [4.0, 0.0]
    assert label_violations(history, behind, tolerance=0.1) == []
