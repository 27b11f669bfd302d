"""Why a call whose time is over got no tokens."""

from dataclasses import replace
from typing import Any

import pytest

from genserve.control.conditions import DaemonCondition, Phase
from genserve.control.leases import PauseLease
from genserve.control.state import StateBoard
from genserve.control.waits import late_because
from genserve.engine.types import PauseMode
from tests.support.phases import enter_phase
from tests.support.scripted_engine import ScriptedEngine

NOW_S = 1000.0
REST_S = 0.25


def lease(name: str, holder: str, expire_time_s: float | None) -> PauseLease:
    """One of a holder, which ends then."""
    return PauseLease(name, holder, PauseMode.KEEP, None, expire_time_s)


def paused_by(*leases: PauseLease) -> StateBoard:
    """A board that these leases pause."""
    return StateBoard(ScriptedEngine(), lambda: leases, "test", DaemonCondition.SERVING)


def test_error_names_holder_and_time_left_of_the_pause_that_ends_last() -> None:
    """And how many more there are: until then nothing is generated."""
    board = paused_by(lease("l1", "ops", NOW_S + 5), lease("l2", "alice@host", NOW_S + 27), lease("l3", "", NOW_S + 9))
    error = late_because(board, NOW_S, REST_S)
    assert error is not None
    assert "paused by alice@host, 27 s left, and 2 more pauses" in error.message
    assert "genserve resume l2" in error.message
    assert error.metadata == {"phase": "PAUSED", "holder": "alice@host", "lease_id": "l2", "left_s": "27"}


def test_a_pause_without_an_end_says_so() -> None:
    """Whatever else there is ends before it."""
    error = late_because(paused_by(lease("l1", "me", None), lease("l2", "ops", NOW_S + 27)), NOW_S, REST_S)
    assert error is not None
    assert "paused by me, no expiry" in error.message
    assert error.metadata == {"phase": "PAUSED", "holder": "me", "lease_id": "l1"}


def test_a_pause_of_a_fleet_is_told_as_the_router_knows_it() -> None:
    """Its lease is what is to be resumed, there."""
    error = late_because(paused_by(replace(lease("l1", "me", None), fleet_lease_id="f1")), NOW_S, REST_S)
    assert error is not None
    assert (error.metadata["holder"], error.metadata["lease_id"]) == ("me", "f1")
    assert "genserve resume f1" in error.message


def test_a_pause_that_ends_before_the_call_does_is_no_reason() -> None:
    """The request may still finish."""
    assert late_because(paused_by(lease("l1", "me", NOW_S + 0.1)), NOW_S, REST_S) is None


@pytest.mark.parametrize("phase", Phase)
def test_only_an_engine_that_generates_nothing_is_a_reason(phase: Phase) -> None:
    """A commit is over in milliseconds. What ends calls has a reason of its own."""
    board: Any = StateBoard(ScriptedEngine(), tuple, "test")
    if phase is not Phase.PAUSED:
        enter_phase(board, phase)
    error = late_because(board, NOW_S, REST_S)
    assert (error is not None) == (phase in (Phase.SLEEPING, Phase.TAINTED))
    assert error is None or error.metadata == {"phase": phase.value}
