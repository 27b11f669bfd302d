"""How a board comes to tell a phase."""

from genserve.control.asleep import Asleep
from genserve.control.conditions import DaemonCondition, EngineCondition, Phase
from genserve.control.state import StateBoard
from genserve.engine.types import ALL_TAGS


def enter_phase(board: StateBoard, phase: Phase) -> None:
    """Brings a board that tells RUNNING to another phase, by the condition of the daemon or of the engine."""
    if phase in (Phase.STARTING, Phase.DRAINING):
        board.become(DaemonCondition(phase.value))
    elif phase is Phase.SLEEPING:
        board.tell_asleep(Asleep(ALL_TAGS))
    elif phase is not Phase.RUNNING:
        board.enter(EngineCondition(phase.value))
    assert board.phase is phase
