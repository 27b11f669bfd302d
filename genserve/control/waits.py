"""Why requests that were admitted get no tokens: who keeps the engine from running, and for how long. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from genserve.control.conditions import RULES, Phase
from genserve.control.leases import PauseLease
from genserve.errors import DeadlineError

_MAX_NAME: Final = 100
"""Characters of a holder's name: what helps stands behind it."""
_LATE: Final = "the call did not finish within its timeout"


@dataclass(frozen=True, slots=True)
class LastPause:
    """Of the leases that pause the engine, the one that ends last. `lease_id`: the one to resume, which is that of the
    fleet if it is a part of one; `expire_time_s`: Unix seconds, None = never; `num_others`: how many more there are."""

    lease_id: str
    holder: str
    expire_time_s: float | None
    num_others: int = 0

    @classmethod
    def of(cls, leases: Iterable[PauseLease]) -> "LastPause | None":
        """None if the engine is not paused."""
        held = tuple(leases)
        if not held:
            return None
        last = max(held, key=lambda each: math.inf if each.expire_time_s is None else each.expire_time_s)
        return cls(last.fleet_lease_id or last.lease_id, last.holder, last.expire_time_s, len(held) - 1)

    def left_s(self, now_s: float) -> float | None:
        """The seconds that are left; None = it never expires."""
        return None if self.expire_time_s is None else max(0.0, self.expire_time_s - now_s)


class CanWait(Protocol):
    """The daemon's state board, or what a front end sees of it."""

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""

    @property
    def last_pause(self) -> LastPause | None:
        """The pause that ends last, None if nobody pauses the engine."""


def late_because(board: CanWait, now_s: float, rest_s: float) -> DeadlineError | None:
    """The error of a call whose time is over in `rest_s` seconds, and the engine generates nothing until then: who
    stops it, for how long, and what helps. None if it runs, or may run before. `now_s`: Unix time."""
    phase, pause = board.phase, board.last_pause
    if pause is not None and phase in (Phase.PAUSED, Phase.APPLYING):
        left_s = pause.left_s(now_s)
        return None if left_s is not None and left_s < rest_s else _paused(pause, left_s)
    if phase in (Phase.SLEEPING, Phase.TAINTED) and (refusal := RULES[phase].generation) is not None:
        return DeadlineError(f"{_LATE}: {refusal.message}", metadata={"phase": phase.value})
    return None


def _paused(pause: LastPause, left_s: float | None) -> DeadlineError:
    holder, lease_id = pause.holder, pause.lease_id
    metadata = {"phase": Phase.PAUSED.value, "holder": holder, "lease_id": lease_id}
    if left_s is not None:
        metadata["left_s"] = f"{left_s:.0f}"
    left = "no expiry" if left_s is None else f"{left_s:.0f} s left"
    others = f", and {pause.num_others} more pauses" if pause.num_others else ""
    name = holder if len(holder) <= _MAX_NAME else f"{holder[:_MAX_NAME]}…"
    return DeadlineError(
        f"{_LATE}: paused by {name or 'a holder without a name'}, {left}{others}; allow more time, or end the pause: "
        f"genserve resume {lease_id}",
        metadata=metadata,
    )
