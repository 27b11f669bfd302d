"""Which router looks after a daemon, and what it has written down."""

from contextlib import ExitStack

import pytest

from genserve.control.membership import CALL_S, NO_RECORD, RETURN_S, FleetCommit, FleetRecord, Membership, RouterRun
from genserve.errors import FleetHeldError, InvalidFieldError
from tests.support.refusals import refuses

A, B = RouterRun("a", "host:1"), RouterRun("b", "host:2")


def membership() -> tuple[Membership, list[str], list[float]]:
    """One, the addresses that its watchers have seen, and the time."""
    seen: list[str] = []
    now_s = [100.0]
    made = Membership(lambda: seen.append(made.router_address), lambda: now_s[0])
    return made, seen, now_s


def test_a_router_has_a_daemon_for_as_long_as_it_watches() -> None:
    """Also if it watches anew before its former watch has ended. Whoever watches the state sees who it is."""
    made, seen, now_s = membership()
    assert made.router_address == ""
    with made.looked_after(A):
        with made.looked_after(A):
            assert made.router_address == "host:1"
        with pytest.raises(FleetHeldError) as caught, made.looked_after(B):
            pass
        assert caught.value.metadata == {"router_address": "host:1"}
    now_s[0] += RETURN_S
    with made.looked_after(B):
        assert made.router_address == "host:2"
    assert (seen[0], seen[-2:]) == ("host:1", ["host:2", ""])


def test_a_router_whose_connection_breaks_gets_its_daemon_back() -> None:
    """A router that stands by does not take it meanwhile. One that starts at the same address is let in at once."""
    made, _, now_s = membership()
    with made.looked_after(A):
        pass
    now_s[0] += RETURN_S - 0.1
    with refuses(FleetHeldError, says="host:1"), made.looked_after(B):
        pass
    with made.looked_after(A):
        pass
    now_s[0] += RETURN_S - 0.1
    with made.looked_after(RouterRun("again", "host:1")):
        assert made.router_address == "host:1"
    now_s[0] += RETURN_S
    with made.looked_after(B):
        assert made.router_address == "host:2"


def test_a_router_that_calls_no_more_loses_its_daemon_to_the_next_one() -> None:
    """Its watch may stay open for ever, because nobody reads it. Its calls are refused, and its watch ends later."""
    made, _, now_s = membership()
    with ExitStack() as stack:
        stack.enter_context(made.looked_after(A))
        now_s[0] += CALL_S - 1
        made.heard("a")
        now_s[0] += CALL_S - 1
        assert made.router_address == "host:1"
        with refuses(FleetHeldError, says="host:1"), made.looked_after(B):
            pass
        now_s[0] += 1
        assert made.router_address == ""  # so that another one asks for it
        made.check("a")  # nobody has come
        made.heard("b")
        assert made.router_address == ""
        made.heard("a")
        assert made.router_address == "host:1"
        now_s[0] += CALL_S
        with made.looked_after(B):
            assert made.router_address == "host:2"
            with refuses(FleetHeldError, says="host:2"):
                made.check("a")
            stack.close()
            assert made.router_address == "host:2"
            with refuses(FleetHeldError, says="host:2"), made.looked_after(A):
                pass


def test_calls_of_a_former_router_are_refused() -> None:
    """Those of the last one are taken after its watch has ended, which may be about to begin anew."""
    made, _, now_s = membership()
    with refuses(FleetHeldError, says="watch"):
        made.check("a")
    with made.looked_after(A):
        made.check("a")
    made.check("a")
    now_s[0] += RETURN_S
    with made.looked_after(B), refuses(FleetHeldError, says="host:2"):
        made.check("a")


def test_a_record_is_kept_unless_it_is_older_than_the_one_that_is_there() -> None:
    """A commit, which cannot fail any more, keeps none then."""
    made, _, _ = membership()
    with made.looked_after(A):
        assert made.record is NO_RECORD
        made.keep("a", FleetRecord(5, b"five"))
        with refuses(InvalidFieldError, field="fleet.epoch"):
            made.keep("a", FleetRecord(4, b"four"))
        made.keep_served(FleetRecord(4, b"four"))
        assert made.record == FleetRecord(5, b"five")
        made.keep_served(FleetRecord(6, b"six"))
        assert made.record == FleetRecord(6, b"six")


def test_weights_are_not_exchanged_for_a_router_that_has_gone() -> None:
    """Its successor counts on what it has found. What was exchanged already it is told."""
    made, _, now_s = membership()
    commit = FleetCommit(made, "a", FleetRecord(7, b"seven"))
    with made.looked_after(A):
        commit.check()
    now_s[0] += RETURN_S
    with made.looked_after(B):
        with refuses(FleetHeldError, says="host:2"):
            commit.check()
        commit.served()
        assert made.record == FleetRecord(7, b"seven")


@pytest.mark.parametrize("router", [RouterRun("", "host:1"), RouterRun("x" * 300, ""), RouterRun("a", "a\nb")])
def test_a_router_has_to_be_named(router: RouterRun) -> None:
    """By what others can read."""
    made, _, _ = membership()
    with refuses(InvalidFieldError), made.looked_after(router):
        pass
    assert made.router_address == ""


def test_an_epoch_of_the_far_future_is_refused() -> None:
    """No later change could have a higher one. A day is allowed: clocks and time zones may be wrong. What is kept
    already is gone on from, wherever it came from."""
    now_s, second = [1_000_000.0], 1 << 32
    made = Membership(lambda: None, wall_clock=lambda: now_s[0])
    with made.looked_after(A):
        made.keep("a", FleetRecord((1_000_000 + 24 * 3600) * second + 7, b"a day"))
        for epoch in ((1_000_000 + 24 * 3600 + 2) * second, (1 << 64) - 1):
            with refuses(InvalidFieldError, field="fleet.epoch", says="clock"):
                made.keep("a", FleetRecord(epoch, b"far"))
            with refuses(InvalidFieldError, field="fleet.epoch", says="clock"):
                made.check_record("a", FleetRecord(epoch, b"far"))
        now_s[0] = 0.0  # it is put right
        made.keep("a", FleetRecord((1_000_000 + 24 * 3600 + 1) * second + 1, b"the next router"))
