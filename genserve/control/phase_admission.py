"""Raises the errors for what a phase refuses. Pure; `conditions` has the rules."""

from typing import Protocol

from genserve.control.conditions import DEAD, RULES, TAINTED, EngineCondition, Phase, Refusal, weights_refusal
from genserve.control.state import StateBoard
from genserve.errors import EngineTaintedError, GenserveError


class HasPhase(Protocol):
    """The daemon's state board, or what a front end sees of it."""

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""

    @property
    def cause_of_death(self) -> str:
        """Why the engine is dead, for people; "" while it lives."""


def check_control(board: HasPhase) -> None:
    """Raises the error if the phase refuses pauses. Pushes and adapters have `check_weights`."""
    if (refusal := RULES[board.phase].control) is not None:
        raise _error(refusal, board)


def check_weights(board: StateBoard) -> None:
    """Raises the error if pushes, adapters and reading the live weights are refused. TAINTED allows them: a complete
    push ends it."""
    if (refusal := weights_refusal(board.engine_condition, board.daemon_condition)) is not None:
        raise _error(refusal, board)


def check_generation(board: HasPhase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    if (refusal := RULES[board.phase].generation) is not None:
        raise _error(refusal, board)


def check_alive(board: StateBoard) -> None:
    """Raises EngineDeadError if the engine is dead, whatever the daemon does."""
    if board.engine_condition is EngineCondition.DEAD:
        raise _error(DEAD, board)


def check_whole(weights_lost: bool) -> None:
    """Raises EngineTaintedError after a sleep of level 2 has dropped the weights, until a version is applied. For calls
    that read the weights."""
    if weights_lost:
        raise EngineTaintedError(
            "a sleep of level 2 dropped the weights, and no version was applied since: push one, or wake up the rest, "
            "which restores the served version"
        )


def check_sound(engine: EngineCondition) -> None:
    """Raises EngineTaintedError while the live weights may be inconsistent. For calls that need consistent weights."""
    if engine is EngineCondition.TAINTED:
        raise TAINTED()


def _error(refusal: Refusal, board: HasPhase) -> GenserveError:
    return refusal(board.cause_of_death if refusal is DEAD else "")
