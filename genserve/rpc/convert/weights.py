"""Messages of WeightService to and from domain types."""

from collections.abc import Iterable, Sequence

from genserve.control.state import EngineState
from genserve.engine.protocol import KvPolicy, WeightDigest
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.values import kv_policy, pause_mode, seconds, to_duration, to_state
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.v1 import weights_pb2
from genserve.weights.push.types import (
    Applied,
    ApplyOptions,
    LoraAdapter,
    PushAction,
    PushHeader,
    PushOutcome,
    PushReport,
    PushState,
)

DEFAULT_APPLY_TIMEOUT_S = 300.0
DEFAULT_STAGING_TTL_S = 300.0

_ACTIONS = {
    weights_pb2.PUSH_ACTION_UNSPECIFIED: PushAction.APPLY,
    weights_pb2.PUSH_ACTION_APPLY: PushAction.APPLY,
    weights_pb2.PUSH_ACTION_STAGE: PushAction.STAGE,
    weights_pb2.PUSH_ACTION_VALIDATE: PushAction.VALIDATE,
}
_STATES_OUT = {state: weights_pb2.PushState.Value(f"PUSH_STATE_{state.value}") for state in PushState}


def push_header(message: weights_pb2.PushHeader) -> PushHeader:
    """The header of a push. Raises InvalidFieldError with the path of the field in PushWeightsRequest."""
    action = _ACTIONS.get(message.action)
    if action is None:
        raise InvalidFieldError.of("header.action", f"{message.action} is no PushAction")
    return PushHeader(
        push_id=message.push_id,
        weight_version=message.weight_version,
        expected_version=message.expected_version if message.HasField("expected_version") else None,
        manifest=manifest(message.manifest) if message.HasField("manifest") else None,
        manifest_digest=message.manifest_digest,
        action=action,
        apply=apply_options(message.apply, "header.apply"),
        staging_ttl_s=seconds(message.staging_ttl, "header.staging_ttl")
        if message.HasField("staging_ttl")
        else DEFAULT_STAGING_TTL_S,
        # No presence in the message: 0 is what a client sends that knows nothing of several streams.
        num_streams=1 if message.num_streams == 0 else message.num_streams,
        force=message.force,
        lora=LoraAdapter(message.lora.lora_name, message.lora.config) if message.HasField("lora") else None,
        attempt=message.attempt,
    )


def manifest(message: weights_pb2.Manifest) -> Manifest:
    """The tensors as they were sent; whether they are right is not asked here."""
    tensors = tuple(TensorSpec(t.name, t.dtype, tuple(t.shape), t.offset, t.length) for t in message.tensors)
    return Manifest(tensors, message.total_bytes, message.partial)


def apply_options(message: weights_pb2.ApplyOptions, field: str) -> ApplyOptions:
    """How to apply; `field` is the path of the message in the request."""
    return ApplyOptions(
        pause_mode=pause_mode(message.pause_mode, f"{field}.pause_mode"),
        kv_policy=kv_policy(message.kv_policy, KvPolicy.RECOMPUTE, f"{field}.kv_policy"),
        pause_lease_id=message.pause_lease_id,
        timeout_s=seconds(message.timeout, f"{field}.timeout")
        if message.HasField("timeout")
        else DEFAULT_APPLY_TIMEOUT_S,
    )


def to_push_response(outcome: PushOutcome, state: EngineState) -> weights_pb2.PushWeightsResponse:
    """What came of a push."""
    return weights_pb2.PushWeightsResponse(
        push=_to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(state)
    )


def to_get_push_response(outcome: PushOutcome, state: EngineState) -> weights_pb2.GetPushResponse:
    """How far a push has come."""
    return weights_pb2.GetPushResponse(
        push=_to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(state)
    )


def to_commit_response(outcome: PushOutcome, state: EngineState) -> weights_pb2.CommitPushResponse:
    """What came of a push."""
    return weights_pb2.CommitPushResponse(
        push=_to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(state)
    )


def to_discard_response(outcome: PushOutcome, state: EngineState) -> weights_pb2.DiscardPushResponse:
    """What was discarded."""
    return weights_pb2.DiscardPushResponse(push=_to_push(outcome.push), state=to_state(state))


def to_weights_response(
    weight_version: int,
    served: Manifest | None,
    digests: Iterable[WeightDigest],
    *,
    resident: bool,
    state: EngineState,
) -> weights_pb2.GetWeightsResponse:
    """What is served; no manifest where the checkpoint's files are not on this machine."""
    return weights_pb2.GetWeightsResponse(
        weight_version=weight_version,
        manifest=None if served is None else to_manifest(served),
        digests=[weights_pb2.WeightDigest(rank=d.rank, name=d.name, sha256=d.sha256) for d in digests],
        state=to_state(state),
        resident=resident,
    )


def to_manifest(served: Manifest) -> weights_pb2.Manifest:
    """The tensors and their places."""
    return weights_pb2.Manifest(
        tensors=[
            weights_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, length=t.length)
            for t in served.tensors
        ],
        total_bytes=served.total_bytes,
        partial=served.partial,
    )


def _to_push(push: PushReport) -> weights_pb2.Push:
    return weights_pb2.Push(
        push_id=push.push_id,
        state=_STATES_OUT[push.state],
        weight_version=push.weight_version,
        received_bytes=push.received_bytes,
        total_bytes=push.total_bytes,
        missing=_to_ranges(push.missing),
        issues=[weights_pb2.PushIssue(tensor=i.tensor, description=i.description) for i in push.issues],
        manifest_digest=push.manifest_digest,
        lora_name=push.lora_name,
        attempt=push.attempt,
    )


def _to_ranges(ranges: Sequence[tuple[int, int]]) -> list[weights_pb2.ByteRange]:
    return [weights_pb2.ByteRange(start=start, end=end) for start, end in ranges]


def to_applied(applied: Applied | None) -> weights_pb2.Applied | None:
    """What applying did; None when nothing was applied."""
    if applied is None:
        return None
    return weights_pb2.Applied(
        previous_version=applied.previous_version,
        active_version=applied.active_version,
        timings=[
            weights_pb2.StepTiming(step=timing.step, duration=to_duration(timing.duration_s))
            for timing in applied.timings
        ],
        paused=None if applied.paused_s is None else to_duration(applied.paused_s),
        requests_kept=applied.requests_kept,
        requests_aborted=applied.requests_aborted,
    )
