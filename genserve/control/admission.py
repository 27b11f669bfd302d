"""What the engine's phase allows. Pure."""

from genserve.control.state import Phase
from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError


def is_serving(phase: Phase) -> bool:
    """Whether health says SERVING: requests are taken, though they may have to wait."""
    return phase in (Phase.RUNNING, Phase.PAUSED, Phase.APPLYING)


def check_control(phase: Phase) -> None:
    """Raises what stands against pauses and pushes in this phase. TAINTED does not: a full push ends it."""
    match phase:
        case Phase.DRAINING:
            raise DrainingError("the daemon is shutting down")
        case Phase.DEAD:
            raise EngineDeadError("the engine has died")
        case Phase.SLEEPING:
            raise EngineSleepingError("the engine sleeps; wake it up first")


def check_admission(phase: Phase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    check_control(phase)
    match phase:
        case Phase.STARTING:
            raise DrainingError("the engine is starting", retry_after_s=1.0)
        case Phase.TAINTED:
            raise EngineTaintedError("the weights could not be proven consistent: push a full version or restart")
