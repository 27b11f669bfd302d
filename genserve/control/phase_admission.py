"""Which calls a phase admits: raises what its rules refuse. Pure; the rules are `conditions`."""

from genserve.control.conditions import RULES, DaemonCondition, EngineCondition, Phase, weights_refusal
from genserve.errors import EngineTaintedError


def check_control(phase: Phase) -> None:
    """Raises why pauses are refused in this phase, and most that pushes and adapters are."""
    if (refusal := RULES[phase].control) is not None:
        raise refusal()


def check_weights(engine: EngineCondition, daemon: DaemonCondition) -> None:
    """Raises why pushes, adapters and reading the live weights are refused. TAINTED does not: a full push ends it."""
    if (refusal := weights_refusal(engine, daemon)) is not None:
        raise refusal()


def check_generation(phase: Phase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    if (refusal := RULES[phase].generation) is not None:
        raise refusal()


def check_whole(weights_lost: bool) -> None:
    """Raises EngineTaintedError while what lies in the place of the weights is of no version, because a sleep of level
    2 has dropped them: for calls that would take it for weights."""
    if weights_lost:
        raise EngineTaintedError(
            "the sleep of level 2 has dropped the weights, and no version was applied since: push one, or wake up the "
            "rest, which restores the served one"
        )


def check_sound(engine: EngineCondition) -> None:
    """Raises EngineTaintedError while the live weights are of no version: for calls that only a sound engine takes."""
    if engine is EngineCondition.TAINTED:
        check_generation(Phase.TAINTED)
