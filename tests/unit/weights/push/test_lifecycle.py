"""The states of a push: every pair of an event and a state, and nothing that is not in the table."""

import pytest

from genserve.weights.push.lifecycle import TRANSITIONS, Lifecycle, State
from genserve.weights.push.types import PushState

EVENTS = ("joined", "truncated", "checking", "staged", "preparing", "applying", "applied", "failed", "dropped")
TO_STATE: dict[State, list[str]] = {
    State.RECEIVING: [],
    State.CHECKING: ["checking"],
    State.STAGED: ["checking", "staged"],
    State.PREPARING: ["checking", "staged", "preparing"],
    State.APPLYING: ["checking", "staged", "preparing", "applying"],
    State.APPLIED: ["checking", "staged", "preparing", "applying", "applied"],
    State.FAILED: ["checking", "failed"],
    State.GONE: ["dropped"],
}


def at(state: State) -> Lifecycle:
    """A push that has come so far."""
    lifecycle = Lifecycle()
    for event in TO_STATE[state]:
        getattr(lifecycle, event)()
    assert lifecycle.state is state
    return lifecycle


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_in_the_table_or_raises(state: State, event: str) -> None:
    """What may not happen cannot be written; it changes nothing."""
    lifecycle = at(state)
    after = TRANSITIONS.get((event, state))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{state.name} cannot be {event}"):
            getattr(lifecycle, event)()
        assert lifecycle.state is state
    else:
        getattr(lifecycle, event)()
        assert lifecycle.state is after


def test_events_have_methods_and_ways_of_the_table_have_events() -> None:
    """Nothing in the table is out of reach, but for what `truncated` does when there is something to go back to."""
    assert {event for event, _ in TRANSITIONS} == {*EVENTS, "restored"}


def test_nothing_leads_out_of_the_end() -> None:
    """What is applied or gone stays so."""
    assert not {state for _, state in TRANSITIONS} & {State.APPLIED, State.GONE}


def test_a_staged_push_is_staged_again_when_another_attempt_breaks_off() -> None:
    """Its bytes were compared, never written."""
    lifecycle = at(State.STAGED)
    lifecycle.joined()
    assert lifecycle.state is State.RECEIVING
    lifecycle.truncated()
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
