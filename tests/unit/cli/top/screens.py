"""Screens with what a daemon and a router tell."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from genserve.cli.top.frame import frame
from genserve.cli.top.lines import plain
from genserve.cli.top.screen import Screen
from genserve.client import PushResult, Replicas, ServerInfo, Status
from genserve.v1 import control_pb2, fleet_pb2, types_pb2, weights_pb2

HERE = datetime(2026, 1, 1, tzinfo=UTC)
MB = 1_000_000


def lease(lease_id: str, holder: str = "trainer", expires_s: int | None = 130) -> types_pb2.PauseLease:
    """A lease; `expires_s` by the clock of the daemon, None = never."""
    granted = types_pb2.PauseLease(lease_id=lease_id, holder=holder, mode=types_pb2.PAUSE_MODE_KEEP)
    if expires_s is not None:
        granted.expire_time.seconds = expires_s
    return granted


def pushing(
    push_id: str = "step-43",
    version: int = 43,
    received_mb: int = 0,
    total_mb: int = 400,
    state: weights_pb2.PushState.ValueType = weights_pb2.PUSH_STATE_RECEIVING,
) -> weights_pb2.PushInFlight:
    """A push that has begun at 98 s by the clock of the daemon."""
    return weights_pb2.PushInFlight(
        push_id=push_id, weight_version=version, received_bytes=received_mb * MB, total_bytes=total_mb * MB,
        state=state, begin_time=Timestamp(seconds=98), state_time=Timestamp(seconds=98), num_streams=2,
    )  # fmt: skip


def status(
    *pushes: weights_pb2.PushInFlight,
    version: int = 42,
    leases: tuple[types_pb2.PauseLease, ...] = (),
    phase: types_pb2.Phase.ValueType = types_pb2.PHASE_RUNNING,
    instance_id: str = "instance-1",
    time_s: int = 100,
    tokens_per_s: float = 1234.0,
) -> Status:
    """What a daemon tells at this time by its clock."""
    state = types_pb2.EngineState(instance_id=instance_id, weight_version=version, phase=phase, pauses=leases)
    load = control_pb2.Load(
        running=64, waiting=3, kv_usage=0.45, tokens_per_second=tokens_per_s, prefix_cache_hit_rate=0.12
    )
    return Status.of(
        control_pb2.GetStatusResponse(state=state, load=load, pushes=pushes, time=Timestamp(seconds=time_s))
    )


def replica(
    address: str,
    version: int = 42,
    state: str = "READY",
    reason: str = "",
    pushes: tuple[weights_pb2.PushInFlight, ...] = (),
) -> fleet_pb2.Replica:
    """A replica that has answered."""
    return fleet_pb2.Replica(
        address=address,
        state=fleet_pb2.ReplicaState.Value(f"REPLICA_STATE_{state}"),
        reason=reason,
        engine=types_pb2.EngineState(weight_version=version, phase=types_pb2.PHASE_RUNNING),
        load=control_pb2.Load(running=32, waiting=1, kv_usage=0.4, tokens_per_second=600.0),
        inflight=33,
        pushes=pushes,
    )


def fleet(*replicas: fleet_pb2.Replica, version: int = 42) -> Replicas:
    """What a router tells."""
    return Replicas.of(fleet_pb2.ListReplicasResponse(replicas=replicas, weight_version=version))


def info() -> ServerInfo:
    """What is served."""
    return ServerInfo.of(control_pb2.GetServerInfoResponse(model="smol", device="cpu"))


def outcome(push_id: str = "step-43", *, failed: str = "") -> PushResult:
    """How a push ended."""
    push = weights_pb2.Push(push_id=push_id, state=weights_pb2.PUSH_STATE_APPLIED, total_bytes=400 * MB)
    if failed:
        push.state = weights_pb2.PUSH_STATE_FAILED
        push.issues.add(description=failed)
        return PushResult.of(weights_pb2.GetPushResponse(push=push))
    applied = weights_pb2.Applied(previous_version=42, active_version=43)
    applied.timings.add(step="receive").duration.FromMilliseconds(200)
    applied.timings.add(step="prepare").duration.FromMilliseconds(1500)
    applied.paused.FromMilliseconds(8)
    return PushResult.of(weights_pb2.GetPushResponse(push=push, applied=applied))


def screen(*told: Status, target: str = "127.0.0.1:50051") -> Screen:
    """A screen that was told these, one each second from 10 s on."""
    shown = Screen(target, 10.0)
    for second, each in enumerate(told):
        shown.took_status(each, 10.0 + second, HERE)
        shown.sample(10.0 + second)
    return shown


def rows(shown: Screen, width: int = 80, height: int | None = 24, now_s: float = 10.0) -> list[str]:
    """The lines of the screen as text."""
    return plain(frame(shown, width, height, now_s)).split("\n")
