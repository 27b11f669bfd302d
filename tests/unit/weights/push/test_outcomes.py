"""What is remembered of pushes whose bytes are not here any more, for whom and for how long."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.errors import PushConflictError, PushRolledBackError, PushTruncatedError
from genserve.weights.push.outcomes import STEPS, Outcomes, PushMeasures
from genserve.weights.push.types import (
    Applied,
    LoraAdapter,
    PushIdentity,
    PushKind,
    PushOutcome,
    PushReport,
    PushState,
)
from genserve.weights.resident import ResidentStore
from tests.unit.weights.conftest import header

NUM_REMEMBERED = 64
"""Of either kind. A trainer asks after a lost answer soon; what is older is of no use."""

TTL_S = 10.0


class Clock:
    """In seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outcomes(clock: Clock) -> Outcomes:
    """Of a daemon that keeps no bytes."""
    return Outcomes(ResidentStore(None, enabled=False), clock)


def push(push_id: str, attempt: str = "a", lora: LoraAdapter | None = None) -> Any:
    """One that has ended."""
    return SimpleNamespace(
        push_id=push_id,
        identity=PushIdentity("digest", 1, lora),
        attempt=SimpleNamespace(name=attempt),
        header=header(push_id, lora=lora, staging_ttl_s=TTL_S),
        report=lambda state=PushState.APPLIED: PushReport(push_id, state, 1, 32, 32, ((0, 32),)),
    )


def applied(outcomes: Outcomes, push_id: str, attempt: str = "a", lora: LoraAdapter | None = None) -> PushOutcome:
    """One more is."""
    ended = push(push_id, attempt, lora)
    outcome = PushOutcome(ended.report())
    outcomes.add_applied(ended, outcome, None)
    return outcome


def refused(outcomes: Outcomes, push_id: str, attempt: str = "a", lora: LoraAdapter | None = None) -> PushConflictError:
    """One more is."""
    error = PushConflictError(f"{push_id} is in conflict with itself")
    outcomes.add_refused(push(push_id, attempt, lora), error)
    return error


def test_the_latest_outcomes_are_remembered(outcomes: Outcomes) -> None:
    """So many of either kind, and no more: a daemon runs for weeks."""
    first = applied(outcomes, "first")
    refused(outcomes, "wrong")
    for number in range(NUM_REMEMBERED - 1):
        applied(outcomes, f"p{number}")
        refused(outcomes, f"w{number}")
    record = outcomes.applied.get("first")
    assert record is not None and record.outcome is first
    assert outcomes.refused("wrong") is not None
    applied(outcomes, "last")
    refused(outcomes, "worst")
    assert outcomes.applied.get("first") is None and outcomes.refused("wrong") is None
    assert outcomes.applied.get("p0") is not None and outcomes.refused("w0") is not None


@pytest.mark.parametrize("lora", [None, LoraAdapter("policy", "{}")])
def test_weights_and_adapters_are_remembered_apart(outcomes: Outcomes, lora: LoraAdapter | None) -> None:
    """However many of the other kind come: a trainer asks again for the version that is served."""
    others = None if lora is not None else LoraAdapter("policy", "{}")
    applied(outcomes, "served", lora=lora)
    refused(outcomes, "wrong", lora=lora)
    for number in range(2 * NUM_REMEMBERED):
        applied(outcomes, f"p{number}", lora=others)
        refused(outcomes, f"w{number}", lora=others)
    assert outcomes.applied.get("served") is not None and outcomes.refused("wrong") is not None
    assert outcomes.applied.get("p0") is None and outcomes.refused("w0") is None


@pytest.mark.parametrize("later_s", [0.0, 60.0])
def test_a_refusal_is_remembered_for_the_time_to_live_of_its_push(
    outcomes: Outcomes, clock: Clock, later_s: float
) -> None:
    """Then the id is free again, whenever somebody asks."""
    refused(outcomes, "p1")
    clock.now_s += TTL_S - 0.001
    assert outcomes.refused("p1") is not None
    clock.now_s += 0.001 + later_s
    assert outcomes.refused("p1") is None
    assert outcomes.refusal(header()) is None


def test_a_refusal_is_told_as_a_failure_without_bytes(outcomes: Outcomes) -> None:
    """With why. Discarding it tells the same, and forgets it."""
    error = refused(outcomes, "p1")
    report = outcomes.forget_refused("p1")
    assert report is not None
    told = report.push
    assert (told.state, told.received_bytes, told.missing) == (PushState.FAILED, 0, ())
    assert [(issue.tensor, issue.description) for issue in told.issues] == [("", error.message)]
    assert outcomes.forget_refused("p1") is None and outcomes.refused("p1") is None


@pytest.mark.parametrize(("attempt", "is_refused"), [("a", True), ("", True), ("b", False)])
def test_only_the_attempt_that_was_refused_gets_the_error(outcomes: Outcomes, attempt: str, is_refused: bool) -> None:
    """And those that do not say which they are. Another one may start over."""
    refused(outcomes, "p1")
    opened = header(attempt=attempt)
    assert outcomes.answers(opened) is is_refused
    assert (outcomes.refusal(opened) is not None) is is_refused


def test_a_push_that_is_applied_after_all_is_not_refused_any_more(outcomes: Outcomes) -> None:
    """By another attempt."""
    refused(outcomes, "p1")
    applied(outcomes, "p1", "b")
    assert outcomes.refused("p1") is None


@pytest.mark.parametrize(("attempt", "is_answered"), [("a", True), ("b", False), ("", False)])
def test_an_adapter_is_loaded_again_by_another_attempt(outcomes: Outcomes, attempt: str, is_answered: bool) -> None:
    """Its bytes are not kept. Weights are answered whoever asks."""
    lora = LoraAdapter("policy", "{}")
    applied(outcomes, "l1", lora=lora)
    applied(outcomes, "p1")
    adapter = header("l1", 0, lora=lora, attempt=attempt)
    assert (outcomes.repeated(adapter) is not None) is is_answered
    assert outcomes.repeated(header(attempt=attempt)) is not None
    assert outcomes.repeated(header("p2")) is None


def test_uncomparable_bytes_are_taken_only_from_the_applied_attempt(outcomes: Outcomes) -> None:
    """Nobody else must be told that they are live. A push that was replaced since is answered as it was."""
    applied(outcomes, "p1")
    record = outcomes.applied.get("p1")
    assert record is not None
    outcomes.compare(record, "a", 0, b"x")
    for other in ("b", ""):
        with pytest.raises(PushConflictError):
            outcomes.compare(record, other, 0, b"x")
    applied(outcomes, "l1", lora=LoraAdapter("policy", "{}"))
    with pytest.raises(PushConflictError):
        outcomes.compare(record, "b", 0, b"x")  # an adapter replaces no weights
    applied(outcomes, "p2")
    outcomes.compare(record, "b", 0, b"x")


def test_an_applied_push_counts_with_its_steps_and_its_pause() -> None:
    """Each step is counted once; a push under a lease did not stop generation by itself."""
    measures = PushMeasures()
    steps = {step: float(number) for number, step in enumerate(STEPS)}
    measures.applied(PushKind.WEIGHTS, Applied(1, 2, steps, 0.25, 3, 0))
    measures.applied(PushKind.LORA, Applied(1, 2, {"receive": 7.0}, None, 3, 0))
    assert {step: each.sum for step, each in measures.steps.items()} == {**steps, "receive": steps["receive"] + 7.0}
    assert (measures.paused.sum, sum(measures.paused.counts)) == (0.25, 1)
    assert measures.outcomes == {(PushKind.WEIGHTS, "APPLIED"): 1, (PushKind.LORA, "APPLIED"): 1}


def test_page_lists_the_steps_in_their_order() -> None:
    """Where a reader looks for the time of a push."""
    page = (Path(__file__).parents[4] / "docs/weights.md").read_text()
    section = page.partition("## Where the time of a push goes\n")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.M)) == STEPS


def test_a_failed_push_counts_by_the_reason_of_its_error() -> None:
    """Only what was undone is a rollback, and an unknown error is an internal one, whatever it says."""
    measures = PushMeasures()
    measures.ended(PushKind.WEIGHTS, "STAGED")
    for error in (PushTruncatedError("x"), PushRolledBackError("y"), PushRolledBackError("z"), ValueError("w")):
        measures.failed(PushKind.WEIGHTS, error)
    assert {outcome: count for (_, outcome), count in measures.outcomes.items()} == {
        "STAGED": 1,
        "PUSH_TRUNCATED": 1,
        "PUSH_ROLLED_BACK": 2,
        "INTERNAL": 1,
    }
    assert measures.num_rolled_back == 2
