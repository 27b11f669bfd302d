"""Raises the errors for what a phase refuses. Pure; `conditions` has the rules."""

from typing import Protocol

from genserve.control.conditions import RULES, DaemonCondition, EngineCondition, Phase, weights_refusal
from genserve.errors import EngineTaintedError


class HasPhase(Protocol):
    """The daemon's state board, or what a front end sees of it."""

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""


def check_control(phase: Phase) -> None:
    """Raises the error if this phase refuses pauses. Pushes and adapters have `check_weights`."""
    if (refusal := RULES[phase].control) is not None:
        raise refusal()


def check_weights(engine: EngineCondition, daemon: DaemonCondition) -> None:
    """Raises the error if pushes, adapters and reading the live weights are refused. TAINTED allows them: a complete
    push ends it."""
    if (refusal := weights_refusal(engine, daemon)) is not None:
        raise refusal()


def check_generation(phase: Phase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    if (refusal := RULES[phase].generation) is not None:
        raise refusal()


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
        check_generation(Phase.TAINTED)
