"""Messages of WeightService to and from domain types."""

from collections.abc import Iterable

from genserve.control.membership import FleetCommit
from genserve.engine.types import WeightDigest
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.values import KV_POLICIES_OF_UPDATES, PAUSE_MODES, member_of, seconds_or, to_timestamp
from genserve.v1 import weights_pb2
from genserve.weights.load.types import CheckpointPath, Load, Peers, Previous
from genserve.weights.push.types import (
    DEFAULT_APPLY_TIMEOUT_S,
    DEFAULT_PREPARED_TTL_S,
    DEFAULT_STAGING_TTL_S,
    Applied,
    ApplyOptions,
    LoraAdapter,
    PrepareMode,
    PushAction,
    PushHeader,
    PushInFlight,
    PushReport,
    PushState,
)
from genserve.wire.conversions import duration_of, manifest_of

_ACTIONS = {
    weights_pb2.PUSH_ACTION_UNSPECIFIED: PushAction.APPLY,
    weights_pb2.PUSH_ACTION_APPLY: PushAction.APPLY,
    weights_pb2.PUSH_ACTION_STAGE: PushAction.STAGE,
    weights_pb2.PUSH_ACTION_VALIDATE: PushAction.VALIDATE,
    weights_pb2.PUSH_ACTION_PREPARE: PushAction.PREPARE,
}
_PREPARE_MODES = {
    weights_pb2.PREPARE_MODE_UNSPECIFIED: PrepareMode.RUNNING,
    weights_pb2.PREPARE_MODE_RUNNING: PrepareMode.RUNNING,
    weights_pb2.PREPARE_MODE_PAUSED: PrepareMode.PAUSED,
}
_STATES_OUT = {state: weights_pb2.PushState.Value(f"PUSH_STATE_{state.value}") for state in PushState}


def push_header(message: weights_pb2.PushHeader) -> PushHeader:
    """The header of a push. Raises InvalidFieldError with the path of the field in PushWeightsRequest."""
    return PushHeader(
        push_id=message.push_id,
        weight_version=message.weight_version,
        expected_version=message.expected_version if message.HasField("expected_version") else None,
        manifest=manifest_of(message.manifest) if message.HasField("manifest") else None,
        manifest_digest=message.manifest_digest,
        action=member_of(_ACTIONS, message.action, "header.action"),
        apply=apply_options(message.apply, "header.apply"),
        staging_ttl_s=seconds_or(message, "staging_ttl", DEFAULT_STAGING_TTL_S, within="header"),
        # The field has no presence: a client that does not know about several streams sends 0.
        num_streams=1 if message.num_streams == 0 else message.num_streams,
        force=message.force,
        lora=LoraAdapter(message.lora.lora_name, message.lora.config) if message.HasField("lora") else None,
        attempt=message.attempt,
        prepared_ttl_s=seconds_or(message, "prepared_ttl", DEFAULT_PREPARED_TTL_S, within="header"),
        content_digest=message.content_digest,
        preemptible=message.preemptible,
    )


def load_of(message: weights_pb2.LoadWeightsRequest, fleet: FleetCommit | None) -> Load:
    """What to fetch, and for which fleet. Raises InvalidFieldError with the path of the field."""
    source: CheckpointPath | Peers | Previous
    match message.WhichOneof("source"):
        case "checkpoint_path":
            source = CheckpointPath(message.checkpoint_path)
        case "peers":
            source = Peers(tuple(message.peers.addresses), message.peers.push_id)
        case "previous":
            source = Previous()
        case None:
            raise InvalidFieldError.of("source", "is required: checkpoint_path, peers or previous")
    return Load(
        source=source,
        push_id=message.push_id,
        weight_version=message.weight_version,
        expected_version=message.expected_version if message.HasField("expected_version") else None,
        force=message.force,
        action=member_of(_ACTIONS, message.action, "action"),
        apply=apply_options(message.apply, "apply"),
        staging_ttl_s=seconds_or(message, "staging_ttl", DEFAULT_STAGING_TTL_S),
        prepared_ttl_s=seconds_or(message, "prepared_ttl", DEFAULT_PREPARED_TTL_S),
        content_digest=message.content_digest,
        preemptible=message.preemptible,
        fleet=fleet,
    )


def apply_options(message: weights_pb2.ApplyOptions, field: str) -> ApplyOptions:
    """How to apply. `field` is the path of the message in the request."""
    return ApplyOptions(
        pause_mode=member_of(PAUSE_MODES, message.pause_mode, f"{field}.pause_mode"),
        kv_policy=member_of(KV_POLICIES_OF_UPDATES, message.kv_policy, f"{field}.kv_policy"),
        pause_lease_id=message.pause_lease_id,
        timeout_s=seconds_or(message, "timeout", DEFAULT_APPLY_TIMEOUT_S, within=field),
        prepare_mode=member_of(_PREPARE_MODES, message.prepare_mode, f"{field}.prepare_mode"),
    )


def to_digests(digests: Iterable[WeightDigest]) -> list[weights_pb2.WeightDigest]:
    """Digests of live tensors."""
    return [weights_pb2.WeightDigest(rank=d.rank, name=d.name, sha256=d.sha256) for d in digests]


def to_push(push: PushReport) -> weights_pb2.Push:
    """How far a push has come."""
    return weights_pb2.Push(
        push_id=push.push_id,
        state=_STATES_OUT[push.state],
        weight_version=push.weight_version,
        received_bytes=push.received_bytes,
        total_bytes=push.total_bytes,
        missing=[weights_pb2.ByteRange(start=start, end=end) for start, end in push.missing],
        issues=[weights_pb2.PushIssue(tensor=i.tensor, description=i.description) for i in push.issues],
        manifest_digest=push.manifest_digest,
        lora_name=push.lora_name,
        attempt=push.attempt,
        content_digest=push.content_digest,
    )


def to_push_in_flight(push: PushInFlight) -> weights_pb2.PushInFlight:
    """How far a push in flight has come."""
    return weights_pb2.PushInFlight(
        push_id=push.push_id,
        state=_STATES_OUT[push.state],
        weight_version=push.weight_version,
        received_bytes=push.received_bytes,
        total_bytes=push.total_bytes,
        lora_name=push.lora_name,
        num_streams=push.num_streams,
        begin_time=to_timestamp(push.began_at_s),
        state_time=to_timestamp(push.state_since_s),
    )


def to_applied(applied: Applied | None) -> weights_pb2.Applied | None:
    """The result of applying; None if nothing was applied."""
    if applied is None:
        return None
    return weights_pb2.Applied(
        previous_version=applied.previous_version,
        active_version=applied.active_version,
        timings=[
            weights_pb2.StepTiming(step=step, duration=duration_of(duration_s))
            for step, duration_s in applied.step_s.items()
        ],
        paused=None if applied.paused_s is None else duration_of(applied.paused_s),
        requests_kept=applied.requests_kept,
        requests_aborted=applied.requests_aborted,
        recomputed_tokens=applied.recomputed_tokens,
        longest_wait=None if applied.longest_wait_s is None else duration_of(applied.longest_wait_s),
        discard=None if applied.discard_s is None else duration_of(applied.discard_s),
    )
