"""How far pushes in flight have come, for the status of the daemon. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import PushState

MAX_LISTED: Final = 16


@dataclass(frozen=True, slots=True)
class PushInFlight:
    """A push in flight. `received_bytes`: distinct bytes that count for the present attempt. `num_streams`: those that
    are open. `began_at_s` and `state_since_s`: when its attempt and its state began, in Unix seconds."""

    push_id: str
    state: PushState
    weight_version: int
    received_bytes: int
    total_bytes: int
    lora_name: str
    num_streams: int
    began_at_s: float
    state_since_s: float


def _described(push: LivePush) -> PushInFlight:
    """How far it has come. Cheap: the missing ranges, which may be many, are not read."""
    return PushInFlight(
        push_id=push.push_id,
        state=push.lifecycle.push_state,
        weight_version=push.header.weight_version,
        received_bytes=push.num_counted,
        total_bytes=push.staging.manifest.total_bytes,
        lora_name=push.header.lora_name,
        num_streams=push.num_attached,
        began_at_s=push.attempt.began_at_s,
        state_since_s=push.lifecycle.since_s,
    )


def in_flight(pushes: Iterable[LivePush]) -> tuple[PushInFlight, ...]:
    """At most `MAX_LISTED` pushes: those that are sent or carried out first, then the newest."""
    first = sorted(pushes, key=lambda push: (not push.is_held, -push.attempt.began_at_s, push.push_id))
    return tuple(map(_described, first[:MAX_LISTED]))
