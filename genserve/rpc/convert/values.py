"""Conversions that the services share: durations, enumerations, how to pause, leases, the state of the engine."""

import enum
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from genserve.control.conditions import Phase
from genserve.control.leases import PauseLease
from genserve.control.state import EngineState, Startup
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import InvalidFieldError
from genserve.v1 import control_pb2, types_pb2

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=enum.Enum)
NumberT = TypeVar("NumberT", bound=int)

DEFAULT_PAUSE_TTL_S = 60.0
MAX_DURATION_S = 366 * 24 * 3600.0

PAUSE_MODES = {
    types_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    types_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    types_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    types_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
_KV_POLICIES = {types_pb2.KV_POLICY_REUSE: KvPolicy.REUSE, types_pb2.KV_POLICY_RECOMPUTE: KvPolicy.RECOMPUTE}
KV_POLICIES_OF_PAUSES = {types_pb2.KV_POLICY_UNSPECIFIED: KvPolicy.REUSE, **_KV_POLICIES}
KV_POLICIES_OF_UPDATES = {types_pb2.KV_POLICY_UNSPECIFIED: KvPolicy.RECOMPUTE, **_KV_POLICIES}
_PAUSE_MODES_OUT = {mode: types_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.name}") for mode in PauseMode}
_PHASES_OUT = {phase: types_pb2.Phase.Value(f"PHASE_{phase.value}") for phase in Phase}


def seconds_or(message: Message, field: str, default: T, *, within: str = "") -> float | T:
    """A duration above 0 and at most a year, in seconds, or `default` where the field is not set. `within`: the path of
    the message in the request."""
    if not message.HasField(field):
        return default
    value: float = getattr(message, field).ToNanoseconds() / 1e9
    if not 0 < value <= MAX_DURATION_S:
        path = f"{within}.{field}" if within else field
        raise InvalidFieldError.of(path, f"must be above 0 s and at most {MAX_DURATION_S:.0f} s, is {value:g} s")
    return value


def to_timestamp(unix_s: float) -> Timestamp:
    """Unix seconds, to the microsecond, which is what a float of today's time holds."""
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(unix_s * 1e6))
    return timestamp


def member_of(values: Mapping[NumberT, EnumT], value: NumberT, field: str) -> EnumT:
    """The member of an enumeration that a message has named. Raises InvalidFieldError."""
    member = values.get(value)
    if member is None:
        kind = type(next(iter(values.values()))).__name__
        raise InvalidFieldError.of(field, f"{value} is not a {kind}")
    return member


def pause_ttl_s(message: control_pb2.PauseRequest) -> float | None:
    """Seconds until a lease expires; None = never."""
    ttl_s = seconds_or(message, "ttl", DEFAULT_PAUSE_TTL_S)
    if not message.no_expiry:
        return ttl_s
    if message.HasField("ttl"):
        raise InvalidFieldError.of("ttl", "cannot be set together with no_expiry")
    return None


def to_lease(lease: PauseLease) -> types_pb2.PauseLease:
    """A lease."""
    message = types_pb2.PauseLease(
        lease_id=lease.lease_id,
        holder=lease.holder,
        mode=_PAUSE_MODES_OUT[lease.mode],
        fleet_lease_id=lease.fleet_lease_id,
    )
    if lease.expire_time_s is not None:
        message.expire_time.CopyFrom(to_timestamp(lease.expire_time_s))
    return message


def to_state(state: EngineState) -> types_pb2.EngineState:
    """The state that every control-plane response carries."""
    return types_pb2.EngineState(
        instance_id=state.instance_id,
        weight_version=state.weight_version,
        phase=_PHASES_OUT[state.phase],
        pauses=map(to_lease, state.pauses),
        running_requests=state.load.running,
        waiting_requests=state.load.waiting,
        asleep_tags=state.asleep_tags,
        weights_discarded=state.weights_discarded,
        startup=None if state.startup is None else _to_startup(state.startup),
        push_id=state.served.push_id,
        content_digest=state.served.content_digest,
        base_digest=state.served.base_digest,
        fleet_epoch=state.fleet_epoch,
        router_address=state.router_address,
    )


def _to_startup(startup: Startup) -> types_pb2.Startup:
    return types_pb2.Startup(
        step=startup.step,
        step_begin_time=to_timestamp(startup.step_begin_s),
        begin_time=to_timestamp(startup.begin_s),
    )
