"""Raises what the rules of a phase refuse. Pure; the rules are `conditions`."""

from genserve.control.conditions import RULES, EngineCondition, Phase


def check_control(phase: Phase) -> None:
    """Raises why pauses, pushes and adapters are refused in this phase. TAINTED does not: a full push ends it."""
    if (refusal := RULES[phase].control) is not None:
        raise refusal()


def check_admission(phase: Phase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    if (refusal := RULES[phase].admission) is not None:
        raise refusal()


def check_sound(engine: EngineCondition) -> None:
    """Raises EngineTaintedError while the live weights are of no version: for calls that only a sound engine takes."""
    if engine is EngineCondition.TAINTED:
        check_admission(Phase.TAINTED)
