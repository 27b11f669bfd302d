"""Who keeps the engine paused, and until when. Pure: the caller passes the clocks, and nothing waits here.

Expiry uses a monotonic clock, so that a jump of the wall clock neither ends a lease nor keeps it for ever.
`expire_time_s` is wall time, for people and routers, and follows when that clock is set.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from genserve.engine.types import PauseCounts, PauseMode
from genserve.errors import InvalidFieldError, PauseLeaseLostError, QueueFullError

MAX_TTL_S = 24 * 3600.0
# Every answer of the control plane contains all leases: together they must stay far below a client's limit of 4 MiB.
MAX_LEASES = 256
_NUM_REMEMBERED = 1024
_CLOCK_SET_S = 0.5
NO_REQUESTS = PauseCounts(kept=0, aborted=0)


@dataclass(frozen=True, slots=True)
class PauseLease:
    """A right to keep the engine paused. `ttl_s` is seconds, `expire_time_s` Unix seconds; None = it never expires.
    `fleet_lease_id`: of the lease of the fleet that this one is a part of, "" = none. `counts`: of requests that the
    pause froze and ended."""

    lease_id: str
    holder: str
    mode: PauseMode
    ttl_s: float | None
    expire_time_s: float | None
    fleet_lease_id: str = ""
    counts: PauseCounts = NO_REQUESTS


@dataclass(slots=True)
class _Held:
    lease: PauseLease
    request_id: str
    due_s: float | None  # on the monotonic clock


def check_ttl(ttl_s: float | None) -> None:
    """Raises InvalidFieldError unless 0 < ttl_s <= 24 h or ttl_s is None (no expiry)."""
    # Written so that NaN is refused too.
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidFieldError.of("ttl", f"must be above 0 s and at most {MAX_TTL_S:g} s, is {ttl_s:g} s")


class LeaseTable:
    """The leases that are held, and how earlier ones ended.

    `clock` gives monotonic seconds, `wall_clock` Unix seconds, `mint` a new lease id. An expired lease cannot be
    renewed, but stays in `active` until `expire` removes it: the caller of `expire` resumes the engine.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        mint: Callable[[], str] = lambda: uuid.uuid4().hex,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._mint = mint
        self._wall_clock = wall_clock
        self._held: dict[str, _Held] = {}
        # By lease id: whether it ended without a release by its holder.
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def grant(
        self,
        holder: str,
        mode: PauseMode,
        ttl_s: float | None,
        request_id: str = "",
        fleet_lease_id: str = "",
        counts: PauseCounts = NO_REQUESTS,
    ) -> PauseLease:
        """Returns a new lease. Call `check_ttl` and `repeated` before: they say whether there may be one."""
        due_s, expire_time_s = self._end_of(ttl_s)
        lease = PauseLease(self._mint(), holder, mode, ttl_s, expire_time_s, fleet_lease_id, counts)
        self._held[lease.lease_id] = _Held(lease, request_id, due_s)
        return lease

    def repeated(self, request_id: str) -> PauseLease | None:
        """The live lease that was granted for a request id; None if a new one is to be granted. Raises QueueFullError
        if there is no room for it."""
        for held in self._held.values():
            if request_id and held.request_id == request_id and not self._is_due(held):
                return held.lease
        if len(self._held) >= MAX_LEASES:
            raise QueueFullError(f"the limit of {len(self._held)} pause leases is reached", retry_after_s=1.0)
        return None

    def renew(self, lease_id: str, ttl_s: float | None) -> PauseLease:
        """Extends a lease to `ttl_s` from now; None = its own time to live.

        Raises PauseLeaseLostError if it is unknown or has ended, and InvalidFieldError for an invalid `ttl_s`.
        """
        check_ttl(ttl_s)
        held = self._held[self.require(lease_id).lease_id]
        if ttl_s is None:
            ttl_s = held.lease.ttl_s
        held.due_s, expire_time_s = self._end_of(ttl_s)
        held.lease = replace(held.lease, ttl_s=ttl_s, expire_time_s=expire_time_s)
        return held.lease

    def require(self, lease_id: str) -> PauseLease:
        """The lease, if it is live; raises PauseLeaseLostError otherwise."""
        held = self._held.get(lease_id)
        if held is None or self._is_due(held):
            raise PauseLeaseLostError(
                f"pause lease {lease_id!r} is unknown or has ended; the engine may have run since",
                metadata={"lease_id": lease_id},
            )
        return held.lease

    def release(self, lease_id: str) -> bool:
        """Ends a lease. Returns whether it had already expired or was ended by force, so that the engine may have run.

        A second release of a lease returns the same. Raises PauseLeaseLostError for an id that was never granted, or
        that ended so long ago that the table has forgotten it.
        """
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._remember(lease_id, self._is_due(held))
        if lease_id not in self._ended:
            raise PauseLeaseLostError(f"no pause lease {lease_id!r} is known", metadata={"lease_id": lease_id})
        return self._ended[lease_id]

    def release_all(self) -> tuple[PauseLease, ...]:
        """Ends every lease, whoever holds it, and returns them."""
        return self._end(list(self._held.values()))

    def expire(self) -> tuple[PauseLease, ...]:
        """Ends the expired leases and returns them."""
        return self._end([held for held in self._held.values() if self._is_due(held)])

    @property
    def active(self) -> tuple[PauseLease, ...]:
        """The leases that keep the engine paused, oldest first."""
        for held in self._held.values():
            told_s = held.lease.expire_time_s
            if held.due_s is not None and told_s is not None:
                expire_time_s = self._wall_clock() + held.due_s - self._clock()
                if abs(expire_time_s - told_s) > _CLOCK_SET_S:
                    held.lease = replace(held.lease, expire_time_s=expire_time_s)
        return tuple(held.lease for held in self._held.values())

    @property
    def next_expiry_s(self) -> float | None:
        """Seconds from now until the next lease expires, 0 if one is due; None if none expires."""
        due = min((held.due_s for held in self._held.values() if held.due_s is not None), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def _end(self, ended: list[_Held]) -> tuple[PauseLease, ...]:
        for held in ended:
            del self._held[held.lease.lease_id]
            self._remember(held.lease.lease_id, True)
        return tuple(held.lease for held in ended)

    def _remember(self, lease_id: str, ended_without_holder: bool) -> None:
        self._ended[lease_id] = ended_without_holder
        if len(self._ended) > _NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def _is_due(self, held: _Held) -> bool:
        return held.due_s is not None and self._clock() >= held.due_s

    def _end_of(self, ttl_s: float | None) -> tuple[float | None, float | None]:
        """When a lease ends that has so much time from now on, on the monotonic clock and on the wall clock."""
        return (None, None) if ttl_s is None else (self._clock() + ttl_s, self._wall_clock() + ttl_s)
