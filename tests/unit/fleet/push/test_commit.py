"""What several replicas did is one answer."""

from google.protobuf.duration_pb2 import Duration

from genserve.fleet.push.commit import merged
from genserve.v1.weights_pb2 import Applied, StepTiming


def seconds(value: int) -> Duration:
    """So long."""
    return Duration(seconds=value)


def test_times_are_the_longest_of_any_and_counts_are_the_sums() -> None:
    """Step by step, and those of a step that only one replica had."""
    first = Applied(
        previous_version=3,
        active_version=4,
        timings=[StepTiming(step="prepare", duration=seconds(5)), StepTiming(step="commit", duration=seconds(1))],
        paused=seconds(2),
        requests_kept=1,
        requests_aborted=2,
        recomputed_tokens=3,
        longest_wait=seconds(1),
    )
    second = Applied(
        previous_version=2,
        active_version=4,
        timings=[StepTiming(step="prepare", duration=seconds(4)), StepTiming(step="resume", duration=seconds(6))],
        requests_kept=10,
        requests_aborted=20,
        recomputed_tokens=30,
        longest_wait=seconds(7),
        discard=seconds(8),
    )
    assert merged([first, second]) == Applied(
        previous_version=3,
        active_version=4,
        timings=[
            StepTiming(step="prepare", duration=seconds(5)),
            StepTiming(step="commit", duration=seconds(1)),
            StepTiming(step="resume", duration=seconds(6)),
        ],
        paused=seconds(2),
        requests_kept=11,
        requests_aborted=22,
        recomputed_tokens=33,
        longest_wait=seconds(7),
        discard=seconds(8),
    )


def test_what_no_replica_has_told_is_not_told() -> None:
    """0 tokens would be a number; and without an answer there is none."""
    assert merged([Applied(active_version=4), Applied(active_version=4)]) == Applied(active_version=4)
    assert merged([]) is None
