"""A router's own series: its replicas together. None has a label for one replica, whose addresses come from callers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from genserve.errors import REASONS
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.router import Router
from genserve.metrics.exposition import Family, counters, gauge, gauges
from genserve.routing.replica import ReplicaState

_NO_PUSHES = dict.fromkeys(("OK", "UNFINISHED", *REASONS), 0)
"""All series are there from the beginning. `increase` does not see the first push of one that begins with it."""


@dataclass(frozen=True, slots=True)
class RouterSeries:
    """Reads the numbers where they are."""

    router: Router
    pushes: FleetPushes

    def read(self) -> Iterable[Family]:
        """The families. Call on the event loop."""
        fleet = self.router.fleet
        members, committed = fleet.members, self.router.weight_version
        states = Counter(fleet.where(member)[0] for member in members)
        lags = [max(0, committed - member.version.number) for member in members if member.version is not None]
        yield gauges(
            "genserve_router_replicas",
            "Replicas by what they are to the router; ready ones get requests.",
            ["state"],
            [([state.value], states[state]) for state in ReplicaState],
        )
        yield gauge(
            "genserve_router_weight_version", "Version that the fleet serves; 0 while it is not known.", committed
        )
        yield gauge(
            "genserve_router_lag_versions",
            "How far the replica that is furthest behind is behind it.",
            max(lags, default=0),
        )
        yield gauge("genserve_router_replicas_behind", "Replicas that are behind it.", sum(lag > 0 for lag in lags))
        yield gauge(
            "genserve_router_inflight_sequences",
            "Sequences that the router has sent to replicas and not seen end.",
            sum(member.inflight for member in members),
        )
        yield gauge("genserve_router_pause_leases", "Leases that keep the fleet paused.", len(fleet.leases.active))
        yield gauge("genserve_router_live_pushes", "Pushes that are on their way.", self.pushes.num_live)
        yield counters(
            "genserve_router_pushes",
            "Pushes that the router was done with: OK, the reason of their error, or UNFINISHED by their trainer.",
            ["outcome"],
            [([outcome], count) for outcome, count in {**_NO_PUSHES, **self.pushes.outcomes}.items()],
        )
