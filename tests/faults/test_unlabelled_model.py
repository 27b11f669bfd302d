"""The model of streams without labels finds what is wrong, and accepts what may be.

Version 5 (b) is pushed from 1 to 2 s, version 6 (c) from 3 to 4 s.
"""

import math
from typing import Any

import pytest

from tests.faults.history import AppliedAnswer, History, Operation, Outcome, PushIntent, UnlabelledStream
from tests.faults.unlabelled_model import served_during, unlabelled_violations


def pushed(version: int, content: str, from_s: float, to_s: float, outcome: Outcome = Outcome.OK) -> Operation:
    """An attempt at a push."""
    applied = AppliedAnswer(0, version) if outcome is Outcome.OK else None
    intent = PushIntent(f"p{version}", version, content)
    return Operation("push", "trainer", 0, from_s, to_s, outcome, push=intent, applied=applied)


def history(*streams: UnlabelledStream, outcome: Outcome = Outcome.OK, **fields: Any) -> History:
    """Of both pushes; `outcome`: of the first one."""
    first = pushed(5, "b", 1, 2 if outcome is Outcome.OK else math.inf, outcome)
    return History([first, pushed(6, "c", 3, 4)], unlabelled=list(streams), **fields)


def stream(from_s: float, *at_s: float, finish: str = "length", error: str = "") -> UnlabelledStream:
    """A token at each of these times, the last of which is its end."""
    ended_s = at_s[-1] if at_s else from_s
    return UnlabelledStream("http0", 0, from_s, [1, 2], [7] * len(at_s), list(at_s), finish, error, ended_s)


@pytest.mark.parametrize(
    ("from_s", "to_s", "expected"),
    [(0.0, 0.5, {"start"}), (0.0, 1.5, {"start", "b"}), (2.5, 2.9, {"b"}), (0.5, 3.5, {"start", "b", "c"}),
     (4.5, 5.0, {"c"})],
)  # fmt: skip
def test_what_may_be_served_is_known_from_the_pushes(from_s: float, to_s: float, expected: set[str]) -> None:
    """A push may be applied between its call and its answer; what it replaced is not served after that."""
    assert served_during(history(), stream(from_s, to_s)) == expected


def test_a_push_without_an_answer_may_be_applied_at_any_time_or_never() -> None:
    """So it may be served until the end of the life, and what was before it until another one has replaced that."""
    unknown = history(outcome=Outcome.UNKNOWN)
    assert served_during(unknown, stream(2.5, 2.9)) == {"start", "b"}
    assert served_during(unknown, stream(4.5, 5.0)) == {"b", "c"}


def test_a_push_that_was_refused_is_never_served() -> None:
    """Nor does it replace anything."""
    assert served_during(history(outcome=Outcome.REFUSED), stream(2.5, 2.9)) == {"start"}


def test_a_token_fits_some_weights_that_were_served() -> None:
    """Which of them may change in the middle of a stream."""
    recorded = history(stream(0.5, 0.9, 1.5))
    assert not unlabelled_violations(recorded, {0: {"start": [0.0, 9.0], "b": [9.0, 0.0]}}, 1.0)
    (found,) = unlabelled_violations(recorded, {0: {"start": [0.0, 9.0], "b": [9.0, 2.0]}}, 1.0)
    assert (found.kind, found.at_s) == ("token of no served weights", 1.5)


@pytest.mark.parametrize("error", ["APIConnectionError", ""])
def test_a_stream_ends_with_a_reason_while_the_daemon_lives(error: str) -> None:
    """Unless its client has cancelled it."""
    broken = stream(0.5, 0.9, finish="", error=error)
    assert [each.kind for each in unlabelled_violations(history(broken), {}, 1.0)] == ["stream failed"]
    assert not unlabelled_violations(history(broken, kills=[(0, 0.8)]), {}, 1.0)
    broken.ended_s = math.inf
    assert not unlabelled_violations(history(broken), {}, 1.0)
