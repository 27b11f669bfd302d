"""Leases of the fleet, told from those of its replicas."""

import time

import pytest

from genserve.errors import PauseLeaseLostError
from genserve.fleet.leases import MAX_ENDED, Leases, is_lease_id, new_lease_id
from genserve.v1 import types_pb2
from tests.support.refusals import refuses

L, M = "1" * 32, "2" * 32


def pause(lease_id: str = L, holder: str = "trainer", left_s: float | None = None) -> types_pb2.PauseLease:
    """A lease as a replica tells it, with a name of its own there."""
    told = types_pb2.PauseLease(
        lease_id=f"own {lease_id}", holder=holder, mode=types_pb2.PAUSE_MODE_KEEP, fleet_lease_id=lease_id
    )
    if left_s is not None:
        told.expire_time.FromNanoseconds(round((time.time() + left_s) * 1e9))
    return told


def held(leases: Leases, address: str) -> list[str]:
    """The leases that a replica lacks."""
    return [lease.lease_id for lease in leases.missing(address)]


@pytest.mark.parametrize("request_id", ["", "of a caller"])
def test_only_what_a_fleet_names_its_leases_is_an_id_of_one(request_id: str) -> None:
    """Others take no room among those that have ended."""
    lease_id = new_lease_id(request_id)
    assert is_lease_id(lease_id)
    assert not any(map(is_lease_id, ("", f"own {lease_id}", lease_id[:-1], f"{lease_id}0", lease_id + "\n", "g" * 32)))


def test_a_lease_is_known_from_one_replica_and_missing_on_the_others() -> None:
    """By its field; a lease that somebody took on a replica alone is not the fleet's."""
    leases = Leases()
    assert held(leases, "a:1") == []
    assert leases.reported(
        "a:1", [pause(holder="my [trainer]\n"), types_pb2.PauseLease(lease_id="x", holder="operator")]
    )
    (lease,) = leases.active
    assert (lease.lease_id, lease.holder, lease.mode) == (L, "my [trainer]\n", types_pb2.PAUSE_MODE_KEEP)
    assert (held(leases, "a:1"), held(leases, "b:2")) == ([], [L])
    assert leases.of_replica(L, "a:1") == f"own {L}"
    with refuses(PauseLeaseLostError, says="b:2"):
        leases.of_replica(L, "b:2")
    assert not leases.reported("a:1", [pause(holder="my [trainer]\n")]), "nothing has changed"
    assert leases.reported("a:1", [pause(holder="my [trainer]\n", left_s=60)]), "it was renewed"


def test_a_lease_that_ended_on_a_replica_is_not_given_to_it_again() -> None:
    """Somebody has ended it there. It is over when it has ended on all."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause()])
    assert leases.reported("a:1", [])
    assert (held(leases, "a:1"), held(leases, "c:3")) == ([], [L])
    leases.reported("b:2", [])
    assert leases.active == [] and leases.known(L) is None
    with pytest.raises(PauseLeaseLostError) as caught:
        leases.get(L)
    assert caught.value.metadata == {"lease_id": L}


def test_a_replica_that_was_away_gets_the_lease_again() -> None:
    """It may have started anew."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause()])
    leases.reported("a:1", [])
    leases.left("a:1")
    assert held(leases, "a:1") == [L]
    leases.left("b:2")
    assert held(leases, "a:1") == [L]  # which the other one has still


def test_a_replica_that_was_away_when_a_lease_was_renewed_lacks_it() -> None:
    """It would end there before its holder expects it to. Nobody has ended it where that happens."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause(left_s=5.0)])
    leases.left("a:1")
    leases.granted(L, "trainer", "b:2", pause(left_s=60.0))
    leases.renewed(L, ["b:2"])
    leases.reported("a:1", [pause(left_s=5.0)])
    assert held(leases, "a:1") == [L]
    assert held(leases, "b:2") == []
    remaining_s = leases.get(L).remaining_s()
    assert remaining_s is not None
    assert remaining_s > 50
    leases.reported("a:1", [])
    assert held(leases, "a:1") == [L]
    leases.granted(L, "trainer", "a:1", pause(left_s=60.0))
    assert held(leases, "a:1") == []


def test_a_lease_whose_last_replica_restarts_is_over() -> None:
    """Nobody has it any more. While that replica was away, it may have been there."""
    leases = Leases()
    leases.reported("a:1", [pause()])
    leases.left("a:1")
    assert [lease.lease_id for lease in leases.active] == [L]
    leases.reported("a:1", [])
    assert leases.active == []


def test_a_lease_outlives_a_restart_while_another_replica_is_away_with_it() -> None:
    """As long as that one was granted it, however long the other one had it."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause(left_s=5.0)])
    leases.granted(L, "trainer", "b:2", pause(left_s=60.0))
    leases.renewed(L, ["b:2"])
    leases.left("b:2")
    leases.left("a:1")
    leases.reported("a:1", [])
    assert held(leases, "a:1") == [L]
    remaining_s = leases.get(L).remaining_s()
    assert remaining_s is not None and remaining_s > 50
    leases.reported("b:2", [])
    assert leases.active == []


def test_a_lease_that_was_written_down_is_as_replicas_tell_it() -> None:
    """From when one has reported it: written down once, and no more when it has ended there."""
    leases = Leases()
    leases.expect([types_pb2.PauseLease(lease_id=L, holder="trainer")])
    assert [each.lease_id for each in leases.to_write()] == [L]
    leases.reported("a:1", [pause()])
    assert [each.lease_id for each in leases.to_write()] == [L]
    leases.reported("a:1", [])
    assert leases.to_write() == []


def test_a_lease_whose_last_replica_is_away_ends_in_time() -> None:
    """No status says that it has expired."""
    leases = Leases()
    leases.reported("a:1", [pause(left_s=-1.0)])
    leases.left("a:1")
    assert leases.active == []


def test_a_lease_that_somebody_has_ended_is_left_over_where_it_still_is() -> None:
    """And given to nobody, also not to those that never had it."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause(), pause(M)])
    leases.mark_ended(L)
    assert leases.was_ended(L) and not leases.was_ended(M)
    assert [lease.lease_id for lease in leases.active] == [M]
    assert (held(leases, "c:3"), leases.left_over("a:1"), leases.left_over("c:3")) == ([M], [(L, f"own {L}")], [])
    with pytest.raises(PauseLeaseLostError):
        leases.get(L)
    leases.resumed(L, "a:1")
    assert (leases.left_over("a:1"), leases.left_over("b:2")) == ([], [(L, f"own {L}")])
    with leases.being_granted(L):
        assert leases.left_over("b:2") == []
    assert (leases.left_over("b:2"), leases.get(L).lease_id) == ([], L)


def test_a_lease_that_is_beginning_counts_when_it_is_granted() -> None:
    """A replica that joins meanwhile is not paused by one that may still fail. A repeat of a pause counts at once."""
    leases = Leases()
    with leases.being_granted(L) as grant:
        assert grant.is_new and leases.is_beginning(L)
        leases.granted(L, "trainer", "a:1", pause())
        assert (leases.active, held(leases, "b:2")) == ([], [])
    assert held(leases, "b:2") == [L]
    with leases.being_granted(L) as grant:
        assert not grant.is_new and not leases.is_beginning(L)
        assert held(leases, "b:2") == [L]
    leases.mark_ended(L)
    with leases.being_granted(L) as grant:
        assert grant.is_new


def test_expired_lease_is_new_once_all_its_replicas_grant_another() -> None:
    """The router is not told at once that a lease has expired. A replica that did not answer still has the old one."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause()])
    with leases.being_granted(L) as grant:
        for address, is_new in (("c:3", False), ("a:1", False), ("b:2", True)):
            grant.own_ids[address] = f"another on {address}"
            assert grant.is_new is is_new
        grant.own_ids["a:1"] = pause().lease_id
        assert not grant.is_new


def test_a_lease_that_a_replica_has_after_all_is_not_given_up() -> None:
    """A status that was written before it was granted may be read later."""
    leases = Leases()
    for address in ("a:1", "b:2"):
        leases.reported(address, [pause()])
    leases.reported("a:1", [])
    leases.reported("a:1", [pause()])
    assert leases.get(L).given_up == set()


def test_lease_that_expires_before_all_grants_is_given_up_by_nobody() -> None:
    """The replica is paused again."""
    leases = Leases()
    with leases.being_granted(L) as grant:
        for address in ("a:1", "b:2"):
            grant.own_ids[address] = pause().lease_id
            leases.granted(L, "trainer", address, pause())
        leases.reported("a:1", [])
    assert held(leases, "a:1") == [L]


def test_lease_table_remembers_the_holders_that_ended_leases() -> None:
    """Its holder is told once more what he was told."""
    leases = Leases()
    for each in (L, M):
        leases.reported("a:1", [pause(each)])
    leases.mark_ended(L)
    leases.mark_ended(M, by_others=True)
    assert (leases.was_ended_by_others(L), leases.was_ended_by_others(M)) == (False, True)
    assert not leases.was_ended_by_others("another")
    leases.mark_all_ended()
    assert leases.was_ended_by_others(M)


@pytest.mark.parametrize("ends_all", [False, True])
def test_a_lease_that_is_ended_while_it_is_granted_has_ended(*, ends_all: bool) -> None:
    """Also one that no replica has granted yet. Those that grant it later are left over."""
    leases = Leases()
    with leases.being_granted(L):
        if ends_all:
            leases.mark_all_ended()
        else:
            leases.mark_ended(L)
        leases.granted(L, "trainer", "a:1", pause())
        assert leases.was_ended(L)
    assert (leases.active, leases.left_over("a:1")) == ([], [(L, f"own {L}")])


@pytest.mark.parametrize(
    ("left_s", "missing", "given"), [(None, [L], [L]), (30.0, [L], [L]), (0.5, [L], []), (-0.5, [], [])]
)
def test_a_lease_that_is_about_to_end_is_not_given_to_others(
    left_s: float | None, missing: list[str], given: list[str]
) -> None:
    """They lack it nevertheless. One without an end is given."""
    leases = Leases()
    leases.reported("a:1", [pause(left_s=left_s)])
    assert held(leases, "b:2") == missing
    assert [lease.lease_id for lease in leases.to_give("b:2")] == given


def test_a_lease_ends_when_the_first_replica_lets_go() -> None:
    """As its message says. Without an end it has none."""
    leases = Leases()
    leases.reported("a:1", [pause(left_s=50)])
    leases.reported("b:2", [pause(left_s=20)])
    leases.reported("c:3", [pause()])
    lease = leases.get(L)
    first_s = lease.on_replicas["b:2"].expire_time.ToNanoseconds() / 1e9
    assert lease.expire_time_s == first_s
    told = lease.message()
    assert (told.lease_id, told.holder, told.mode) == (L, "trainer", types_pb2.PAUSE_MODE_KEEP)
    assert told.expire_time.ToNanoseconds() / 1e9 == pytest.approx(first_s, abs=1e-6)
    leases.reported("d:4", [pause(M)])
    assert not leases.get(M).message().HasField("expire_time") and leases.get(M).remaining_s() is None


def test_the_id_of_a_lease_is_that_of_its_request() -> None:
    """After a restart too; without a request it is new each time."""
    assert new_lease_id("r") == new_lease_id("r") != new_lease_id("s")
    assert new_lease_id("") != new_lease_id("")


def test_leases_that_ended_long_ago_are_forgotten() -> None:
    """Only so many are known: the last ones."""
    leases = Leases()
    for number in range(MAX_ENDED + 1):
        leases.mark_ended(str(number))
    assert [leases.was_ended(str(number)) for number in (0, 1, MAX_ENDED)] == [False, True, True]


def test_a_lease_that_is_held_for_long_stays_the_fleets() -> None:
    """However many others are granted meanwhile."""
    leases = Leases()
    leases.adopt([L])
    leases.reported("a:1", [pause()])
    for number in range(MAX_ENDED + 1):
        with leases.being_granted(f"{number:032x}"):
            pass
        if not number % 1000:
            leases.reported("a:1", [pause()])
    leases.reported("a:1", [pause()])
    assert [lease.lease_id for lease in leases.active] == [L]


def test_a_lease_of_another_fleet_is_told_from_one_that_has_ended() -> None:
    """Until the replica that has brought it along is resumed."""
    leases = Leases()
    leases.adopt([L])
    leases.reported("a:1", [pause(L), pause(M)])
    leases.mark_ended(L)
    assert leases.left_over("a:1") == [(L, f"own {L}"), (M, f"own {M}")]
    assert leases.has_foreign("a:1") and not leases.has_foreign("b:2")
    leases.resumed(M, "a:1")
    assert not leases.has_foreign("a:1")
