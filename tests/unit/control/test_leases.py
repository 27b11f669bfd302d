"""The lease table: who keeps the engine paused, decided on clocks that the test moves."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from genserve.control.leases import LeaseTable, check_ttl
from genserve.engine.types import PauseMode
from genserve.errors import InvalidFieldError, PauseLeaseLostError
from tests.support.refusals import refuses


class Clocks:
    """A monotonic and a wall clock that move apart when told to."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self.wall_s = 1_800_000_000.0

    def advance(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def table(clocks: Clocks) -> LeaseTable:
    return _table(clocks)


def _table(clocks: Clocks) -> LeaseTable:
    ids = itertools.count()
    return LeaseTable(lambda: clocks.monotonic_s, lambda: f"lease-{next(ids)}", lambda: clocks.wall_s)


def test_repeated_request_answers_the_same_lease(table: LeaseTable) -> None:
    """A trainer that did not get the answer asks again, and does not end up with two leases."""
    first = table.grant("trainer", PauseMode.KEEP, 60.0, request_id="r1")
    assert table.repeated("r1") == first


def test_requests_without_an_id_get_leases_of_their_own(table: LeaseTable) -> None:
    """An empty request id is no id."""
    table.grant("a", PauseMode.KEEP, 60.0)
    assert table.repeated("") is None


def test_request_id_of_an_ended_lease_is_granted_anew(table: LeaseTable, clocks: Clocks) -> None:
    """Idempotency lasts as long as the lease: a lease that has ended cannot be what a new pause answers."""
    table.grant("trainer", PauseMode.KEEP, 60.0, request_id="r1")
    clocks.advance(60.0)
    assert table.repeated("r1") is None


def test_lease_ends_at_its_time_and_not_before(table: LeaseTable, clocks: Clocks) -> None:
    """ttl_s is exact, and next_expiry_s tells how long to sleep."""
    lease = table.grant("trainer", PauseMode.KEEP, 60.0)
    clocks.advance(59.0)
    assert table.next_expiry_s == 1.0
    assert table.expire() == ()
    clocks.advance(1.0)
    assert table.next_expiry_s == 0.0
    assert table.expire() == (lease,)
    assert table.active == ()
    assert table.next_expiry_s is None


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_wall_clock_jump_moves_no_expiry(table: LeaseTable, clocks: Clocks, jump_s: float) -> None:
    """Somebody who sets the machine's clock neither resumes the engine nor leaves it paused for ever."""
    table.grant("trainer", PauseMode.KEEP, 60.0)
    clocks.wall_s += jump_s
    clocks.advance(59.0)
    assert table.expire() == ()
    clocks.advance(1.0)
    assert len(table.expire()) == 1


def test_the_told_expiry_follows_a_clock_that_is_set(table: LeaseTable, clocks: Clocks) -> None:
    """A router counts by it how much time is left, and people do."""
    table.grant("trainer", PauseMode.KEEP, 60.0)
    table.grant("operator", PauseMode.KEEP, None)
    clocks.advance(10.0)
    clocks.wall_s -= 300.0
    assert [each.expire_time_s for each in table.active] == [clocks.wall_s + 50.0, None]


def test_expire_time_is_wall_time(table: LeaseTable, clocks: Clocks) -> None:
    """People see when a lease ends in Unix seconds; one without expiry shows none."""
    assert table.grant("trainer", PauseMode.KEEP, 60.0).expire_time_s == clocks.wall_s + 60.0
    assert table.grant("admin", PauseMode.KEEP, None).expire_time_s is None


def test_renewal_counts_from_now(table: LeaseTable, clocks: Clocks) -> None:
    """None renews for the lease's own time to live, a number becomes its time to live."""
    lease = table.grant("trainer", PauseMode.KEEP, 60.0)
    clocks.advance(50.0)
    assert table.renew(lease.lease_id, None).ttl_s == 60.0
    assert table.next_expiry_s == 60.0
    table.renew(lease.lease_id, 10.0)
    assert table.next_expiry_s == 10.0
    assert table.active[0].expire_time_s == clocks.wall_s + 10.0


def test_lease_without_expiry_stays_so_when_renewed(table: LeaseTable, clocks: Clocks) -> None:
    """None of a lease that never ends is never."""
    lease = table.grant("admin", PauseMode.KEEP, None)
    assert table.renew(lease.lease_id, None).ttl_s is None
    clocks.advance(1e9)
    assert table.expire() == ()


def test_expired_lease_cannot_be_renewed(table: LeaseTable, clocks: Clocks) -> None:
    """Also in the moment between its end and its being cleared away: the holder has to know that the engine may have
    run."""
    lease = table.grant("trainer", PauseMode.KEEP, 60.0)
    clocks.advance(60.0)
    with pytest.raises(PauseLeaseLostError):
        table.renew(lease.lease_id, None)
    table.expire()
    with pytest.raises(PauseLeaseLostError):
        table.renew(lease.lease_id, None)


def test_unknown_lease_is_lost(table: LeaseTable) -> None:
    """An id that was never granted is the caller's mistake, not an expired lease."""
    for call in (lambda: table.renew("nobody", None), lambda: table.require("nobody"), lambda: table.release("nobody")):
        with pytest.raises(PauseLeaseLostError) as lost:
            call()
        assert lost.value.metadata == {"lease_id": "nobody"}


def test_release_tells_whether_the_lease_had_ended_before(table: LeaseTable, clocks: Clocks) -> None:
    """The holder of an expired lease learns it, cleared away or not, and as often as it asks."""
    in_time, due, cleared = (table.grant("trainer", PauseMode.KEEP, ttl_s) for ttl_s in (60.0, 10.0, 5.0))
    clocks.advance(5.0)
    table.expire()
    clocks.advance(5.0)
    for lease, expired in ((in_time, False), (due, True), (cleared, True)):
        assert table.release(lease.lease_id) is expired
        assert table.release(lease.lease_id) is expired


def test_lease_ended_by_somebody_else_is_told_to_its_holder(table: LeaseTable) -> None:
    """After release_all the engine may have run, as after an expiry."""
    lease = table.grant("trainer", PauseMode.KEEP, 60.0)
    assert table.release_all() == (lease,)
    assert table.release(lease.lease_id) is True


def test_ended_leases_are_forgotten_at_last(table: LeaseTable) -> None:
    """A trainer that pauses every step for weeks does not fill the memory."""
    first = table.grant("trainer", PauseMode.KEEP, 60.0)
    table.release(first.lease_id)
    for _ in range(1023):
        table.release(table.grant("trainer", PauseMode.KEEP, 60.0).lease_id)
    assert table.release(first.lease_id) is False, "it is one of the last 1024"
    table.release(table.grant("trainer", PauseMode.KEEP, 60.0).lease_id)
    with pytest.raises(PauseLeaseLostError):
        table.release(first.lease_id)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 86400.1, float("nan"), float("inf")])
def test_time_to_live_out_of_range_is_refused(table: LeaseTable, ttl_s: float) -> None:
    """Above 0 and at most a day; the error names the field, and a lease keeps its time."""
    lease = table.grant("trainer", PauseMode.KEEP, 86400.0)
    for refused in (lambda: check_ttl(ttl_s), lambda: table.renew(lease.lease_id, ttl_s)):
        with refuses(InvalidFieldError, field="ttl"):
            refused()
    check_ttl(86400.0)
    assert table.active == (lease,)


class LeaseHistory(RuleBasedStateMachine):
    """Any history of the table against a dictionary from lease to the time it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.table = _table(self.clocks)
        self.held: dict[str, float] = {}
        self.known: list[str] = []
        self.ttls: dict[str, float] = {}

    @rule(ttl_s=st.integers(1, 20))
    def grant(self, ttl_s: int) -> None:
        lease = self.table.grant("h", PauseMode.KEEP, float(ttl_s))
        self.held[lease.lease_id] = self.clocks.monotonic_s + ttl_s
        self.ttls[lease.lease_id] = ttl_s
        self.known.append(lease.lease_id)

    @rule(seconds=st.integers(0, 15), jump_s=st.sampled_from([0, -1000, 1000]))
    def advance(self, seconds: int, jump_s: int) -> None:
        self.clocks.advance(seconds)
        self.clocks.wall_s += jump_s

    @rule(data=st.data(), ttl_s=st.none() | st.integers(1, 20))
    def renew(self, data: st.DataObject, ttl_s: int | None) -> None:
        if not self.known:
            return
        lease_id = data.draw(st.sampled_from(self.known))
        if self.held.get(lease_id, 0.0) <= self.clocks.monotonic_s:
            with pytest.raises(PauseLeaseLostError):
                self.table.renew(lease_id, ttl_s)
            return
        self.table.renew(lease_id, ttl_s)
        self.ttls[lease_id] = self.ttls[lease_id] if ttl_s is None else ttl_s
        self.held[lease_id] = self.clocks.monotonic_s + self.ttls[lease_id]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.held:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        assert self.table.release(lease_id) is (self.held.pop(lease_id) <= self.clocks.monotonic_s)

    @rule()
    def expire(self) -> None:
        ended = {lease.lease_id for lease in self.table.expire()}
        assert ended == {i for i, due_s in self.held.items() if due_s <= self.clocks.monotonic_s}
        self.held = {i: due_s for i, due_s in self.held.items() if i not in ended}

    @invariant()
    def active_leases_are_those_held(self) -> None:
        assert {lease.lease_id for lease in self.table.active} == set(self.held)
        expected = min(self.held.values(), default=None)
        if expected is not None:
            expected = max(0.0, expected - self.clocks.monotonic_s)
        assert self.table.next_expiry_s == expected


TestLeaseHistory = LeaseHistory.TestCase
TestLeaseHistory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
