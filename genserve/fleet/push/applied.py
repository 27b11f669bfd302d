"""What applying a push did on all replicas, as one answer. Pure."""

from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from genserve.v1 import weights_pb2


def merged(each: Sequence[weights_pb2.Applied]) -> weights_pb2.Applied | None:
    """Times are the longest of any replica, step by step; requests and tokens are the sums; versions are those of the
    first. None if nothing was applied."""
    if not each:
        return None
    first = each[0]
    answer = weights_pb2.Applied(
        previous_version=first.previous_version,
        active_version=first.active_version,
        requests_kept=sum(applied.requests_kept for applied in each),
        requests_aborted=sum(applied.requests_aborted for applied in each),
    )
    steps: dict[str, Duration] = {}
    for applied in each:
        for timing in applied.timings:
            known = steps.get(timing.step)
            steps[timing.step] = timing.duration if known is None else _longest((known, timing.duration))
    answer.timings.extend(weights_pb2.StepTiming(step=step, duration=duration) for step, duration in steps.items())
    told = [applied.recomputed_tokens for applied in each if applied.HasField("recomputed_tokens")]
    if told:
        answer.recomputed_tokens = sum(told)
    for field in ("paused", "longest_wait", "discard"):
        durations = [getattr(applied, field) for applied in each if applied.HasField(field)]
        if durations:
            getattr(answer, field).CopyFrom(_longest(durations))
    return answer


def _longest(durations: Iterable[Duration]) -> Duration:
    return max(durations, key=Duration.ToNanoseconds)
