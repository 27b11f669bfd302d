"""The daemon's state as front ends see it."""

from types import SimpleNamespace
from typing import Any

from genserve.control.conditions import DaemonCondition, EngineCondition, Phase
from genserve.control.leases import PauseLease
from genserve.control.state import StateBoard
from genserve.control.waits import LastPause
from genserve.engine.types import PauseMode
from genserve.frontends.state import NUM_WORDS, SharedState, StateWriter
from genserve.memory.words import SharedWords


async def test_a_change_can_be_read_before_anybody_is_told() -> None:
    """Of the phase, of the version, of health and of the end."""
    engine: Any = SimpleNamespace(weights=SimpleNamespace(version=0), cause_of_death="")
    board = StateBoard(engine, lambda: (), "id", DaemonCondition.STARTING)
    words = SharedWords.create(NUM_WORDS, "state")
    StateWriter(board, words)
    seen = SharedState(words)
    assert (seen.phase, seen.is_serving, seen.is_over) == (Phase.STARTING, False, False)
    board.become(DaemonCondition.SERVING)
    assert (seen.phase, seen.weight_version, seen.is_serving) == (Phase.RUNNING, 0, True)
    with board.applying(None):
        engine.weights.version = 7
        assert seen.phase is Phase.APPLYING
    assert (seen.phase, seen.weight_version) == (Phase.RUNNING, 7)
    board.tell_answers(False)
    assert not seen.is_serving
    board.become(DaemonCondition.DRAINING)
    assert seen.phase is Phase.DRAINING
    board.end()
    assert seen.is_over
    assert seen.cause_of_death == ""
    engine.cause_of_death = "ended by SIGKILL: " + "é" * 300
    board.enter(EngineCondition.DEAD)
    assert seen.cause_of_death == "ended by SIGKILL: " + "é" * 247, "as much as there is room for"
    assert (seen.phase, seen.is_over) == (Phase.DEAD, True)


def test_front_ends_know_the_holder_and_the_end_of_a_pause() -> None:
    """They serve the calls that wait for it. A name may be longer than there is room for."""
    leases: list[PauseLease] = []
    engine: Any = SimpleNamespace(weights=SimpleNamespace(version=0), cause_of_death="")
    board = StateBoard(engine, lambda: leases, "id", DaemonCondition.SERVING)
    words = SharedWords.create(NUM_WORDS, "state")
    StateWriter(board, words)
    seen = SharedState(words)
    assert seen.last_pause is None
    for expire_time_s in (1234.5, None):
        leases.append(PauseLease(f"lease {len(leases)}", "é" * 300, PauseMode.KEEP, None, expire_time_s))
        board.notify()
        told = LastPause(leases[-1].lease_id, "é" * 256, expire_time_s, len(leases) - 1)
        assert (seen.phase, seen.last_pause) == (Phase.PAUSED, told)
    leases[:] = [PauseLease("l", "me", PauseMode.KEEP, None, 9.0)]
    board.notify()
    assert seen.last_pause == LastPause("l", "me", 9.0, 0), "nothing is left of a longer name"
    leases.clear()
    board.notify()
    assert (seen.phase, seen.last_pause) == (Phase.RUNNING, None)
