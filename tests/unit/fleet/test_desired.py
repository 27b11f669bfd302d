"""The epochs of a fleet."""

from genserve.errors import InvalidFieldError
from genserve.fleet.desired import MAX_LORAS_BYTES, Desired, FleetSleep, Version
from genserve.v1 import types_pb2
from tests.support.refusals import refuses

LIFE = 1 << 32


def test_each_change_has_an_epoch_of_its_own() -> None:
    """Also one that fails."""
    desired = Desired(0)
    desired.begin()
    first = desired.issue()
    second = desired.issue()
    assert (first, second, desired.epoch) == (LIFE + 1, LIFE + 2, 1)
    desired.change(second)
    assert desired.epoch == second
    desired.change(first)  # was late: what holds now has an epoch above both
    assert desired.epoch == LIFE + 3
    desired.change()
    assert desired.epoch == LIFE + 4


def test_new_router_numbers_its_changes_above_its_predecessors() -> None:
    """Also those that it has not seen. Until it changes something, it says what the one before has said."""
    desired = Desired(0)
    desired.adopt(types_pb2.FleetState(epoch=LIFE + 7))
    assert (desired.epoch, desired.is_own) == (LIFE + 7, False)
    assert (desired.knows(LIFE + 7), desired.knows(LIFE + 8)) == (True, False)
    desired.change()
    assert (desired.epoch, desired.is_own) == (2 * LIFE + 1, True)
    assert desired.knows(LIFE + 8)
    desired.overtake(5 * LIFE + 3)
    assert desired.epoch == 6 * LIFE + 1


def test_changes_of_a_later_router_are_above_those_that_it_has_not_seen() -> None:
    """By the time of its start."""
    former, later = Desired(1000.5), Desired(1001.5)
    former.begin()
    later.begin()
    assert former.issue() < former.issue() < later.issue()


def test_two_routers_of_one_second_number_their_changes_apart() -> None:
    """Each of them may have a part of the replicas, and an epoch is to name one record."""
    one, other = Desired(1000.2, mark=7), Desired(1000.8, mark=8)
    ours = [one.issue() for _ in range(100)]
    theirs = [other.issue() for _ in range(100)]
    assert not set(ours) & set(theirs)
    assert not any(map(one.knows, theirs))
    one.adopt(types_pb2.FleetState(epoch=theirs[-1]))
    assert one.issue() > theirs[-1] + 100


def test_what_was_found_comes_before_what_was_written_down() -> None:
    """A router that has found nothing written down may have started before the replica that has it answers."""
    desired = Desired(0)
    desired.begin()
    assert not desired.knows(LIFE + 1)


def test_a_record_says_all_of_it() -> None:
    """And is read again."""
    desired = Desired(0)
    desired.asleep = FleetSleep(frozenset({"scheduling", "weights", "kv_cache"}), 2)
    desired.loras = {"poet": "/adapters/poet"}
    lease = types_pb2.PauseLease(lease_id="l", holder="trainer")
    record = desired.record(9, Version(3, "p", "d", "b"), [lease])
    assert Version.of(record) == Version(3, "p", "d", "b")
    assert list(record.leases) == [lease]
    other = Desired(0)
    other.adopt(record)
    assert (other.epoch, other.asleep, other.loras) == (9, desired.asleep, desired.loras)


def test_nothing_is_woken_up_while_parts_fall_asleep() -> None:
    """Nor what sleeps already put to sleep again."""
    desired = Desired(0)
    assert desired.asleep_tags == frozenset()
    with desired.changing_sleep(desired.asleep):
        assert desired.asleep_tags is None
    assert desired.asleep_tags == frozenset()


def test_what_another_router_of_the_same_second_has_written_is_not_known() -> None:
    """Two routers that start at the same time number their changes alike."""
    one, other = Desired(1000.0), Desired(1000.0)
    for desired in (one, other):
        desired.begin()
        desired.change()
    other.change()
    assert one.knows(one.epoch)
    assert not one.knows(other.epoch)


def test_an_adapter_has_its_room_until_another_one_took_its_place() -> None:
    """A load that fails leaves the long path, beside what was loaded meanwhile."""
    desired, long_path = Desired(0), "/" * (MAX_LORAS_BYTES // 2)
    desired.loras = {"poet": long_path}
    with (
        desired.loading("poet", "/short"),
        refuses(InvalidFieldError, field="path"),
        desired.loading("cook", long_path),
    ):
        pass
    desired.loras = {"poet": "/short"}
    with desired.loading("poet", long_path), refuses(InvalidFieldError, field="path"), desired.loading("b", long_path):
        pass
    with desired.loading("cook", long_path):
        pass
