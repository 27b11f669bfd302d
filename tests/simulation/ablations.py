"""The safeguards of a fleet, each of which can be taken away: a simulation that finds nothing without one proves
nothing with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from genserve.control.membership import Membership
from genserve.fleet.desired import Desired, Version
from genserve.fleet.fleet import Fleet
from genserve.fleet.leases import Leases
from genserve.fleet.member import ReplicaClock
from genserve.fleet.pauses import FleetPauses
from genserve.fleet.router import Router
from genserve.fleet.watch import Watch
from tests.simulation.plan import Plan, plan_of

Ablation: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _calls_of_former_routers(patch: pytest.MonkeyPatch) -> None:
    """A daemon carries out what a router asks that does not look after it any more."""
    patch.setattr(Membership, "check", lambda membership, router_id: None)


def _several_routers(patch: pytest.MonkeyPatch) -> None:
    """A daemon lets every router watch it."""
    patch.setattr(Membership, "_may_have_it", lambda membership, router: True)


def _highest_number(patch: pytest.MonkeyPatch) -> None:
    """A router that starts takes the record with the highest version, as it was before there were epochs."""
    adopt = Fleet._adopt

    def settle(fleet: Fleet) -> None:
        records = [each.record for each in fleet.members if each.record is not None and each.version is not None]
        if fleet.committed is None and records:
            adopt(fleet, max(records, key=lambda record: record.weight_version))
        else:
            settled(fleet)

    settled = Fleet.settle
    patch.setattr(Fleet, "settle", settle)


def _undone_pauses(patch: pytest.MonkeyPatch) -> None:
    """A pause that fails leaves those paused that have granted it."""

    async def left(pauses: FleetPauses, lease_id: str) -> bool:
        return False

    end = FleetPauses._begin_undoing

    def leave(pauses: FleetPauses, lease_id: str, turn: Any) -> Any:
        patch.setattr(pauses, "_end", lambda lease_id: left(pauses, lease_id))
        pauses._fleet.leases._ended.pop(lease_id, None)
        return end(pauses, lease_id, turn)

    patch.setattr(FleetPauses, "_begin_undoing", leave)


def _paused_joiners(patch: pytest.MonkeyPatch) -> None:
    """A replica that joins a paused fleet gets requests at once."""
    patch.setattr(Leases, "missing", lambda leases, address: [])
    patch.setattr(Leases, "to_give", lambda leases, address: [])


def _versions_of_joiners(patch: pytest.MonkeyPatch) -> None:
    """Two versions are the same if their numbers are."""
    patch.setattr(Version, "is_same", lambda one, other: one.number == other.number)


def _settling(patch: pytest.MonkeyPatch) -> None:
    """A router that starts takes what the first replica tells."""

    async def settle(router: Any) -> None:
        while router.fleet.committed is None:
            changed = router.fleet.states_changed.next
            router.fleet.settle()
            if router.fleet.committed is None:
                await changed.wait()

    patch.setattr(Router, "settle", settle)


def _giving_way(patch: pytest.MonkeyPatch) -> None:
    """Of two routers that have each a part of the fleet none gives way."""
    patch.setattr(Watch, "_check_free", lambda watch: None)


def _marks_of_epochs(patch: pytest.MonkeyPatch) -> None:
    """Two routers that start in the same second number their changes alike."""
    begin = Desired.__init__
    patch.setattr(Desired, "__init__", lambda desired, started_s, mark=0: begin(desired, started_s))


def _clocks_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """The router takes the times of leases that replicas tell for times of its own clock."""
    patch.setattr(ReplicaClock, "lease", lambda clock, lease: lease)


ABLATIONS: dict[str, Ablation] = {
    "calls of former routers are refused": _calls_of_former_routers,
    "one router at a time": _several_routers,
    "epochs are compared, not versions": _highest_number,
    "pauses are undone": _undone_pauses,
    "joiners are paused": _paused_joiners,
    "versions are more than numbers": _versions_of_joiners,
    "a router waits for all replicas": _settling,
    "one of two routers gives way": _giving_way,
    "routers of one second number apart": _marks_of_epochs,
    "leases end by the clocks of replicas": _clocks_of_replicas,
}

_STORIES: dict[str, Callable[[Plan], bool]] = {
    "epochs are compared, not versions": lambda plan: plan.is_plain,
    "leases end by the clocks of replicas": lambda plan: plan.are_clocks_wrong,
}


def is_about(safeguard: str, seed: int) -> bool:
    """Whether the story of a seed has what this safeguard is for, and little besides."""
    return safeguard not in _STORIES or _STORIES[safeguard](plan_of(seed))


@contextmanager
def without(safeguard: str) -> Iterator[None]:
    """The fleet lacks a safeguard in the block."""
    with pytest.MonkeyPatch.context() as patch:
        ABLATIONS[safeguard](patch)
        yield
