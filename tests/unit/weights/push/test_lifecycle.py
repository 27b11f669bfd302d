"""The states of a push: every pair of an event and a stage, and nothing that is not in the table."""

import pytest

from genserve.weights.push.lifecycle import TRANSITIONS, Lifecycle, Stage
from genserve.weights.push.types import PushState

EVENTS = ("joined", "truncated", "completed", "staged", "preparing", "applying", "applied", "failed", "dropped")
TO_STAGE: dict[Stage, list[str]] = {
    Stage.RECEIVING: [],
    Stage.CHECKING: ["completed"],
    Stage.STAGED: ["completed", "staged"],
    Stage.PREPARING: ["completed", "staged", "preparing"],
    Stage.APPLYING: ["completed", "staged", "preparing", "applying"],
    Stage.APPLIED: ["completed", "staged", "preparing", "applying", "applied"],
    Stage.FAILED: ["completed", "failed"],
    Stage.GONE: ["dropped"],
}


def at(stage: Stage) -> Lifecycle:
    """A push that has come so far."""
    lifecycle = Lifecycle()
    for event in TO_STAGE[stage]:
        getattr(lifecycle, event)()
    assert lifecycle.stage is stage
    return lifecycle


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_in_the_table_or_raises(stage: Stage, event: str) -> None:
    """What may not happen cannot be written; it changes nothing."""
    lifecycle = at(stage)
    after = TRANSITIONS.get((event, stage))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{stage.name} cannot be {event}"):
            getattr(lifecycle, event)()
        assert lifecycle.stage is stage
    else:
        getattr(lifecycle, event)()
        assert lifecycle.stage is after


def test_events_have_methods_and_ways_of_the_table_have_events() -> None:
    """Nothing in the table is out of reach, but for what `truncated` does when there is something to go back to."""
    assert {event for event, _ in TRANSITIONS} == {*EVENTS, "restored"}


def test_nothing_leads_out_of_the_end() -> None:
    """What is applied or gone stays so."""
    assert not {stage for _, stage in TRANSITIONS} & {Stage.APPLIED, Stage.GONE}


def test_a_staged_push_is_staged_again_when_another_attempt_breaks_off() -> None:
    """Its bytes were compared, never written."""
    lifecycle = at(Stage.STAGED)
    lifecycle.joined()
    assert lifecycle.stage is Stage.RECEIVING
    lifecycle.truncated()
    assert lifecycle.stage is Stage.STAGED


def test_busy_is_what_nobody_may_take_away() -> None:
    """Whatever is busy cannot be dropped or joined."""
    for stage in Stage:
        lifecycle = at(stage)
        forbidden = {("dropped", stage), ("joined", stage)} & TRANSITIONS.keys()
        assert lifecycle.is_busy == (not forbidden and stage not in (Stage.APPLIED, Stage.GONE))


def test_every_stage_has_a_word_on_the_wire() -> None:
    """Also those that the wire does not know."""
    assert [at(stage).state for stage in (Stage.CHECKING, Stage.GONE)] == [PushState.RECEIVING, PushState.FAILED]
    assert all(isinstance(at(stage).state, PushState) for stage in Stage)
