"""The states of a push: every pair of an event and a state, and nothing that is not in the table."""

from typing import get_args

import pytest

from genserve.aio import Change
from genserve.weights.push.lifecycle import TRANSITIONS, Event, Lifecycle, State
from genserve.weights.push.types import PushState

EVENTS: tuple[Event, ...] = get_args(Event)
TO_STATE: dict[State, list[Event]] = {
    State.RECEIVING: [],
    State.CHECKING: ["checking"],
    State.STAGED: ["checking", "staged"],
    State.PREPARING: ["checking", "staged", "preparing"],
    State.PREPARED: ["checking", "staged", "preparing", "prepared"],
    State.APPLYING: ["checking", "staged", "preparing", "applying"],
    State.APPLIED: ["checking", "staged", "preparing", "applying", "applied"],
    State.FAILED: ["checking", "failed"],
    State.GONE: ["dropped"],
}


def at(state: State) -> Lifecycle:
    """A push that has come so far."""
    lifecycle = Lifecycle()
    for event in TO_STATE[state]:
        lifecycle.go(event)
    assert lifecycle.state is state
    return lifecycle


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_in_the_table_or_raises(state: State, event: Event) -> None:
    """What may not happen cannot be written; it changes nothing."""
    lifecycle = at(state)
    after = TRANSITIONS.get((event, state))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{state.name} cannot be {event}"):
            lifecycle.go(event)
        assert lifecycle.state is state
    else:
        lifecycle.go(event)
        assert lifecycle.state is after


def test_each_event_has_a_transition() -> None:
    """No event is without effect, and the table has no other one."""
    assert {event for event, _ in TRANSITIONS} == {*EVENTS}


@pytest.mark.parametrize("state", [State.STAGED, State.PREPARED, State.FAILED])
def test_a_commit_goes_the_whole_way_again(state: State) -> None:
    """From whatever waits for one; what was checked or prepared before is not for the states to know."""
    lifecycle = at(state)
    assert lifecycle.can_commit
    for event in TO_STATE[State.APPLIED]:
        lifecycle.go(event)
    assert lifecycle.state is State.APPLIED


def test_every_event_and_nothing_else_is_reported() -> None:
    """Whoever waits for a state sees each one."""
    told: list[str] = []

    class Told(Change):
        def notify(self) -> None:
            told.append(lifecycle.state.name)

    lifecycle = Lifecycle(Told())
    for event in TO_STATE[State.PREPARED]:
        lifecycle.go(event)
    with pytest.raises(RuntimeError):
        lifecycle.go("applied")
    lifecycle.go("unprepared")
    assert told == ["CHECKING", "STAGED", "PREPARING", "PREPARED", "STAGED"]


def test_nothing_leads_out_of_the_end() -> None:
    """What is applied or gone stays so."""
    assert not {state for _, state in TRANSITIONS} & {State.APPLIED, State.GONE}


def test_a_staged_push_is_staged_again_when_another_attempt_breaks_off() -> None:
    """Its bytes were compared, never written."""
    lifecycle = at(State.STAGED)
    lifecycle.go("joined")
    assert lifecycle.state is State.RECEIVING
    lifecycle.go("truncated")
    lifecycle.go("restored")
    assert lifecycle.state is State.STAGED


def test_busy_is_what_nobody_may_take_away() -> None:
    """Whatever is busy cannot be dropped or joined."""
    for state in State:
        lifecycle = at(state)
        forbidden = {("dropped", state), ("joined", state)} & TRANSITIONS.keys()
        assert lifecycle.is_busy == (not forbidden and state not in (State.APPLIED, State.GONE))


def test_every_stage_has_a_word_on_the_wire() -> None:
    """Also those that the wire does not know."""
    assert [at(state).push_state for state in (State.CHECKING, State.GONE)] == [PushState.RECEIVING, PushState.FAILED]
    assert all(isinstance(at(state).push_state, PushState) for state in State)
