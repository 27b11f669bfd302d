"""The fleet that a daemon belongs to: which router looks after it, and what that has written down of the fleet. Pure.

A router looks after a daemon for as long as it watches its status, and nobody else may meanwhile. So of two routers
with the same replicas one is refused, until the other has ended: and for a while longer, because a connection may break
and come back, unless it listens where the other one did. What the former one still has on its way is refused as well:
calls of routers name the run of the router that they come from.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genserve.errors import FleetHeldError, InvalidFieldError
from genserve.wire.bounds import check_text


@dataclass(frozen=True, slots=True)
class RouterRun:
    """A run of a router. `address`: where it listens, for people."""

    router_id: str
    address: str


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """What a fleet should be, as its router has written it down; the daemon reads nothing of it but its epoch, and of
    which version it is."""

    epoch: int
    content: bytes
    weight_version: int = 0
    push_id: str = ""


RETURN_S = 5.0
"""In which a router whose watch has ended may come back before another one is let in."""
CALL_S = 60.0
"""A router that watches makes a call now and then. Without one for so long it may not even read what its watch tells,
and another one is let in."""
NO_RECORD = FleetRecord(0, b"")
EPOCHS_PER_S = 1 << 32
"""Routers number their changes from the second of their start on: see genserve.fleet.desired."""
_MAX_AHEAD_S = 24 * 3600
"""Clocks of the hosts of a fleet differ by minutes; one that is set in another time zone by hours."""


class Membership:
    """The router of this daemon, and the last record of its fleet. Calls `tell` at each change. `clock`: in
    seconds; `wall_clock`: since 1970."""

    def __init__(
        self,
        tell: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tell = tell
        self.clock = clock
        self._wall_clock = wall_clock
        self._left_at_s = -math.inf
        self._called_at_s = -math.inf
        self._router: RouterRun | None = None
        self._watches: Counter[str] = Counter()
        self.is_let_go = False
        """The router has reported that nothing is lost with this daemon."""
        self.record = NO_RECORD

    @property
    def router_address(self) -> str:
        """Where the router that looks after this daemon listens; "" = none does."""
        return self._router.address if self._router is not None and self._is_watched else ""

    @property
    def _is_watched(self) -> bool:
        """Whether its router watches, and makes calls."""
        if self._router is None or not self._watches[self._router.router_id]:
            return False
        return self.clock() < self._called_at_s + CALL_S

    def let_go(self, router_id: str) -> None:
        """The router of this daemon has reported that nothing is lost with it. Raises FleetHeldError."""
        self.check(router_id)
        self.is_let_go = True
        self._tell()

    @contextmanager
    def looked_after(self, router: RouterRun) -> Iterator[None]:
        """While a router watches. Raises FleetHeldError if another one does, or did so just now, and
        InvalidFieldError."""
        check_text(router.router_id, "router.router_id")
        check_text(router.address, "router.address")
        if not router.router_id:
            raise InvalidFieldError.of("router.router_id", "must not be empty")
        if not self._may_have_it(router):
            raise self._held()
        self._router = router
        self._called_at_s = self.clock()
        self._watches[router.router_id] += 1
        self._tell()
        try:
            yield
        finally:
            self._watches[router.router_id] -= 1
            if not self._watches[router.router_id]:
                del self._watches[router.router_id]
                if router == self._router:
                    self._left_at_s = self.clock()
            self._tell()

    def _may_have_it(self, router: RouterRun) -> bool:
        held = self._router
        if held is None or held.router_id == router.router_id:
            return True
        if self._watches[held.router_id]:
            return not self._is_watched
        return held.address == router.address or self.clock() >= self._left_at_s + RETURN_S

    def check(self, router_id: str) -> None:
        """Raises FleetHeldError for a call of a router that does not look after this daemon, or does not any more."""
        if self._router is None or router_id != self._router.router_id:
            raise self._held()

    def heard(self, router_id: str) -> None:
        """A call of a router is carried out."""
        if self._router is not None and router_id == self._router.router_id:
            self._called_at_s = self.clock()

    def check_record(self, router_id: str, record: FleetRecord) -> None:
        """Raises FleetHeldError as `check`, and InvalidFieldError for an epoch that no later change could exceed."""
        self.check(router_id)
        now_s, at_s = self._wall_clock(), record.epoch // EPOCHS_PER_S
        if at_s > max(now_s + _MAX_AHEAD_S, self.record.epoch // EPOCHS_PER_S + 1):
            raise InvalidFieldError.of(
                "fleet.epoch",
                f"is {record.epoch}: its router has started {(at_s - now_s) / 3600:.0f} hours from now by the clock of "
                "this host; set the clocks of both",
            )

    def keep(self, router_id: str, record: FleetRecord) -> None:
        """Keeps what the router that looks after this daemon has written down. Raises as `check_record`, and
        InvalidFieldError for an epoch that is below the one that is kept."""
        self.check_record(router_id, record)
        if record.epoch < self.record.epoch:
            raise InvalidFieldError.of("fleet.epoch", f"is {record.epoch}, and {self.record.epoch} is kept already")
        self.record = record
        self._tell()

    def keep_served(self, record: FleetRecord) -> None:
        """The same for a version that has just been exchanged, whoever looks after this daemon by now: a router that
        came meanwhile learns from it what is served. A later record stays."""
        if record.epoch >= self.record.epoch:
            self.record = record
            self._tell()

    def _held(self) -> FleetHeldError:
        if self._router is None:
            return FleetHeldError("no router looks after this daemon: watch its status first")
        return FleetHeldError(
            f"the router at {self._router.address} looks after this daemon: end that router first, or take the daemon "
            "out of its fleet (genserve replicas remove)",
            metadata={"router_address": self._router.address},
        )


@dataclass(frozen=True, slots=True)
class FleetCommit:
    """The commit of a version that a router has asked for, or its fetch, and the record of the fleet with it."""

    membership: Membership
    router_id: str
    record: FleetRecord

    def check(self) -> None:
        """To be called before weights are exchanged. Raises FleetHeldError if another router looks after the daemon by
        now, which counts on what it has found here, and as `Membership.check_record`."""
        self.membership.check_record(self.router_id, self.record)

    def served(self) -> None:
        """To be called in the moment in which the version is live."""
        self.membership.keep_served(self.record)
