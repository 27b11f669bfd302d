"""What became of pushes, as numbers."""

from genserve.errors import PushRolledBackError, PushTruncatedError
from genserve.weights.push.measures import STEPS, PushMeasures
from genserve.weights.push.types import Applied, PushKind, timings_of


def test_an_applied_push_counts_with_its_steps_and_its_pause() -> None:
    """Each step is counted once; a push under a lease did not stop generation by itself."""
    measures = PushMeasures()
    steps = {step: float(number) for number, step in enumerate(STEPS)}
    measures.applied(PushKind.WEIGHTS, Applied(1, 2, timings_of(steps), 0.25, 3, 0))
    measures.applied(PushKind.LORA, Applied(1, 2, timings_of({"receive": 7.0}), None, 3, 0))
    assert {step: each.sum for step, each in measures.steps.items()} == {**steps, "receive": 7.0}
    assert (measures.paused.sum, sum(measures.paused.counts)) == (0.25, 1)
    assert measures.outcomes == {(PushKind.WEIGHTS, "APPLIED"): 1, (PushKind.LORA, "APPLIED"): 1}


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
