"""The board: what is told of the engine, and who is woken by a change."""

import asyncio

import pytest

from genserve.control.asleep import Asleep
from genserve.control.conditions import DaemonCondition, EngineCondition, Phase
from genserve.control.state import StateBoard
from genserve.engine.types import ALL_TAGS
from tests.support.patience import STEP_S, turns
from tests.support.scripted_engine import ScriptedEngine


def new_board() -> StateBoard:
    """Of an engine that runs, without leases."""
    return StateBoard(ScriptedEngine(), tuple, "test")


@pytest.mark.parametrize("later", [None, EngineCondition.APPLYING, EngineCondition.TAINTED])
def test_a_dead_engine_stays_dead(later: EngineCondition | None) -> None:
    """Whoever was at work with it may say so after it has died."""
    board = new_board()
    board.enter(EngineCondition.DEAD)
    board.enter(later)
    assert (board.engine_condition, board.phase) == (EngineCondition.DEAD, Phase.DEAD)
    assert board.is_over


def test_a_daemon_that_drains_does_not_serve_again() -> None:
    """Its start may end after that."""
    board = StateBoard(ScriptedEngine(), tuple, "test", DaemonCondition.STARTING)
    assert (board.phase, board.is_serving) == (Phase.STARTING, False)
    board.become(DaemonCondition.SERVING)
    assert (board.phase, board.is_serving) == (Phase.RUNNING, True)
    board.become(DaemonCondition.DRAINING)
    board.become(DaemonCondition.SERVING)
    assert (board.phase, board.daemon_condition, board.is_serving) == (Phase.DRAINING, DaemonCondition.DRAINING, False)


def test_an_engine_that_does_not_answer_is_not_served() -> None:
    """Until it answers again."""
    board = new_board()
    board.tell_answers(False)
    assert not board.is_serving
    board.tell_answers(True)
    assert board.is_serving


def test_a_version_that_is_applied_takes_the_place_of_lost_weights() -> None:
    """And wakes nothing up."""
    board = new_board()
    assert (board.state().asleep_tags, board.state().weights_discarded) == ((), False)
    board.tell_asleep(Asleep(ALL_TAGS, weights_lost=True))
    assert board.state().weights_discarded
    board.tell_applied()
    assert not board.state().weights_discarded
    assert board.asleep.tags == ALL_TAGS


@pytest.mark.parametrize(
    "change",
    [
        lambda board: board.enter(EngineCondition.APPLYING),
        lambda board: board.tell_asleep(Asleep()),
        lambda board: board.become(DaemonCondition.DRAINING),
        lambda board: board.tell_answers(False),
        lambda board: board.end(),
        lambda board: board.notify(),
    ],
)
async def test_change_wakes_present_waiters_and_no_later_ones(change: object) -> None:
    """Watchers tell what they see; one that comes afterwards waits for the next."""
    board = new_board()
    waiting = [asyncio.create_task(board.wait_change()) for _ in range(2)]
    await turns()
    change(board)  # type: ignore[operator]
    await asyncio.wait_for(asyncio.gather(*waiting), STEP_S)
    later = asyncio.create_task(board.wait_change())
    await turns()
    assert not later.done()
    later.cancel()


def test_a_board_tells_what_its_engine_has_to_do() -> None:
    """And of which version it is."""
    engine = ScriptedEngine()
    engine.weight_version = 7
    state = StateBoard(engine, tuple, "test").state()
    assert (state.instance_id, state.weight_version, state.pauses) == ("test", 7, ())
    assert (state.load.running, state.load.waiting) == (3, 2)


def test_a_board_is_over_when_the_daemon_has_drained() -> None:
    """Not before: its last state is still to come."""
    board = new_board()
    board.become(DaemonCondition.DRAINING)
    assert not board.is_over
    board.end()
    assert board.is_over
