"""The state, load and pushes of a fleet, as those of one daemon. Pure."""

from collections.abc import Sequence
from typing import Final

from genserve.fleet.member import Member
from genserve.v1 import control_pb2, types_pb2, weights_pb2

_MAX_PUSHES: Final = 16
"""As of a daemon."""
_ORDER = (
    types_pb2.PHASE_RUNNING,
    types_pb2.PHASE_APPLYING,
    types_pb2.PHASE_PAUSED,
    types_pb2.PHASE_SLEEPING,
    types_pb2.PHASE_TAINTED,
    types_pb2.PHASE_STARTING,
    types_pb2.PHASE_DRAINING,
    types_pb2.PHASE_DEAD,
)
_SERVING = (types_pb2.PHASE_RUNNING, types_pb2.PHASE_APPLYING, types_pb2.PHASE_PAUSED, types_pb2.PHASE_DRAINING)
"""What a replica may do that gets no requests, and the fleet does not."""


def engine_state(
    instance_id: str,
    weight_version: int,
    members: Sequence[Member],
    pauses: Sequence[types_pb2.PauseLease],
    *,
    is_draining: bool,
    fleet_epoch: int = 0,
    none_ready: types_pb2.Startup | None = None,
) -> types_pb2.EngineState:
    """The state of the fleet: the phase of the replica that is best off, sums of requests, the fleet's own leases.
    `members`: those that count, which are the READY ones if there are any. `none_ready`: why there are none, and since
    when: whatever they do, the fleet does not serve then."""
    engines = [member.engine for member in members if member.engine is not None]
    phases = {engine.phase for engine in engines}
    phase = next((phase for phase in _ORDER if phase in phases), types_pb2.PHASE_STARTING)
    if none_ready is not None and phase in _SERVING:
        phase = types_pb2.PHASE_STARTING
    is_starting = phase == types_pb2.PHASE_STARTING and not is_draining
    return types_pb2.EngineState(
        instance_id=instance_id,
        weight_version=weight_version,
        phase=types_pb2.PHASE_DRAINING if is_draining else phase,
        pauses=pauses,
        fleet_epoch=fleet_epoch,
        running_requests=sum(engine.running_requests for engine in engines),
        waiting_requests=sum(engine.waiting_requests for engine in engines),
        asleep_tags=sorted({tag for engine in engines for tag in engine.asleep_tags}),
        weights_discarded=any(engine.weights_discarded for engine in engines),
        startup=none_ready if is_starting else None,
    )


def fleet_load(members: Sequence[Member]) -> control_pb2.Load:
    """Sums of sequences and tokens; means of shares."""
    loads = [member.load for member in members if member.load is not None]
    count = max(1, len(loads))
    return control_pb2.Load(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_usage=sum(load.kv_usage for load in loads) / count,
        tokens_per_second=sum(load.tokens_per_second for load in loads),
        prefix_cache_hit_rate=sum(load.prefix_cache_hit_rate for load in loads) / count,
    )


def fleet_pushes(members: Sequence[Member]) -> list[weights_pb2.PushInFlight]:
    """One entry for each push, in the order in which replicas tell them: as it is on the one that has received most of
    it, the first one of several."""
    furthest: dict[str, weights_pb2.PushInFlight] = {}
    for member in members:
        for push in member.pushes:
            known = furthest.get(push.push_id)
            if known is None or push.received_bytes > known.received_bytes:
                furthest[push.push_id] = push
    return list(furthest.values())[:_MAX_PUSHES]
