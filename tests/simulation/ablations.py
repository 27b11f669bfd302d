"""The safeguards of a fleet, each of which can be taken away: a simulation that finds nothing without one proves
nothing with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from genserve.control.membership import Membership
from genserve.fleet.desired import Desired
from genserve.fleet.fleet import Fleet
from genserve.fleet.leases import Leases
from genserve.fleet.member import Member
from genserve.fleet.pauses import FleetPauses
from genserve.fleet.version import Version

Ablation = Callable[[pytest.MonkeyPatch], None]


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


def _short_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease in its last second counts for nobody who lacks it."""
    patch.setattr(Leases, "missing", lambda leases, address: leases._lacking(address, 5.0))


def _lost_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease counts only while a replica that has it answers."""

    def left(leases: Leases, address: str) -> None:
        for lease in list(leases._leases.values()):
            lease.given_up.discard(address)
            leases.resumed(lease.lease_id, address)

    patch.setattr(Leases, "left", left)


def _records_with_commits(patch: pytest.MonkeyPatch) -> None:
    """The record of a version is written after its commit has been answered, and not in the moment of the exchange."""

    def keep_nothing(membership: Membership, router_id: str, record: object) -> None:
        """Nothing is kept."""

    patch.setattr(Membership, "keep_served", keep_nothing)


def _believed_latecomers(patch: pytest.MonkeyPatch) -> None:
    """A replica that answers later with a higher epoch is not believed."""
    patch.setattr(Desired, "knows", lambda desired, epoch: True)


def _versions_of_joiners(patch: pytest.MonkeyPatch) -> None:
    """Two versions are the same if their numbers are."""
    patch.setattr(Version, "is_same", lambda one, other: one.number == other.number)


def _lost_answers_of_commits(patch: pytest.MonkeyPatch) -> None:
    """A replica that serves a push whose commit was not answered does not decide the version."""

    def serves(fleet: Fleet, upstream: Any, version: Version) -> None:
        upstream.member.serves(version)

    patch.setattr(Fleet, "serves", serves)


def _doubted_commits(patch: pytest.MonkeyPatch) -> None:
    """A replica whose commit was not answered counts as one that has not committed."""
    patch.setattr(Member, "doubt", lambda member: None)


def _settling(patch: pytest.MonkeyPatch) -> None:
    """A router that starts takes what the first replica tells."""
    from genserve.fleet.router import Router

    async def settle(router: Any) -> None:
        while router.fleet.committed is None:
            changed = router.fleet.states_changed.next
            router.fleet.settle()
            if router.fleet.committed is None:
                await changed.wait()

    patch.setattr(Router, "settle", settle)


ABLATIONS: dict[str, Ablation] = {
    "calls of former routers are refused": _calls_of_former_routers,
    "one router at a time": _several_routers,
    "epochs are compared, not versions": _highest_number,
    "pauses are undone": _undone_pauses,
    "joiners are paused": _paused_joiners,
    "leases count to their last second": _short_leases,
    "leases of who is away count": _lost_leases,
    "records come with commits": _records_with_commits,
    "who answers later is believed": _believed_latecomers,
    "versions are more than numbers": _versions_of_joiners,
    "lost answers of commits are made up for": _lost_answers_of_commits,
    "who did not answer is doubted": _doubted_commits,
    "a router waits for all replicas": _settling,
}


@contextmanager
def without(safeguard: str) -> Iterator[None]:
    """The fleet lacks a safeguard in the block."""
    with pytest.MonkeyPatch.context() as patch:
        ABLATIONS[safeguard](patch)
        yield
