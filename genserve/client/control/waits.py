"""Why a request gets no tokens, in words, from what a daemon or a router tells of its state."""

import math
from datetime import UTC, datetime

from genserve.client.control.state import EngineState, PauseLease, Status


def why_waiting(status: Status) -> str:
    """Who or what keeps all requests waiting now, and for how long; "" if tokens are generated."""
    state = status.state
    now = datetime.now(UTC) if status.time is None else status.time
    if state.startup is not None:
        return state.startup.described(now)
    if state.phase == "sleeping":
        return "the engine is asleep; wake it up: genserve wake-up"
    if state.pauses and state.phase not in ("dead", "tainted"):
        return _paused(state.pauses, now)
    if state.phase not in ("running", "applying"):
        return f"it is {state.phase}"
    return _queued(state) if state.phase == "running" and state.waiting_requests else ""


def time_left(lease: PauseLease, now: datetime) -> str:
    """How long a pause still lasts, for people."""
    if lease.expire_time is None:
        return "no expiry"
    return f"{max((lease.expire_time - now).total_seconds(), 0):.0f} s left"


def _paused(pauses: list[PauseLease], now: datetime) -> str:
    last = max(pauses, key=lambda each: math.inf if each.expire_time is None else each.expire_time.timestamp())
    others = f", and {len(pauses) - 1} more pauses" if len(pauses) > 1 else ""
    who = last.holder or "a holder without a name"
    return f"paused by {who}, {time_left(last, now)}{others}; to end the pause: genserve resume {last.lease_id}"


def _queued(state: EngineState) -> str:
    return f"{state.running_requests} sequences run, and {state.waiting_requests} wait for their turn"
