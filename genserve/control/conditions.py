"""The conditions of the engine and of the daemon, and what follows from both. Pure.

The two are separate because one must not hide the other: a daemon that drains still has to know that its engine is
tainted. Clients are told one `Phase` for the pair, and what they are refused follows from that phase alone. What the
daemon itself may do to the engine follows from the engine's condition alone.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError, GenserveError


class EngineCondition(enum.Enum):
    """What the engine is doing. RUNNING and PAUSED follow from the pause leases; the others are entered and left."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    APPLYING = "APPLYING"
    ASLEEP = "ASLEEP"
    TAINTED = "TAINTED"
    DEAD = "DEAD"


class DaemonCondition(enum.Enum):
    """How far the daemon is between its start and its end."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"


class Phase(enum.Enum):
    """What clients are told; the values are the names of genserve.v1.Phase without their prefix."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    APPLYING = "APPLYING"
    TAINTED = "TAINTED"
    SLEEPING = "SLEEPING"
    DRAINING = "DRAINING"
    DEAD = "DEAD"


def phase_of(engine: EngineCondition, daemon: DaemonCondition) -> Phase:
    """The phase of a pair: DEAD before DRAINING before STARTING before what the engine is doing."""
    if engine is EngineCondition.DEAD:
        return Phase.DEAD
    if daemon is not DaemonCondition.SERVING:
        return Phase(daemon.value)
    return Phase.SLEEPING if engine is EngineCondition.ASLEEP else Phase(engine.value)


def may_run(engine: EngineCondition) -> bool:
    """Whether the engine may schedule requests once no pause lease is left. Nothing may be sampled from weights of no
    version, and a sleeping engine has no memory."""
    return engine in (EngineCondition.RUNNING, EngineCondition.PAUSED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is refused in a phase."""

    error: type[GenserveError]
    message: str
    retry_after_s: float | None = None

    def __call__(self) -> GenserveError:
        """A new error to raise."""
        return self.error(self.message, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a phase allows. `serves`: health says SERVING; `admission`: why requests for tokens are refused, None = they
    are admitted, perhaps to wait; `control`: the same for pauses, pushes and adapters."""

    serves: bool
    admission: Refusal | None = None
    control: Refusal | None = None


_STARTING = Refusal(DrainingError, "the engine is starting", retry_after_s=1.0)
_DRAINING = Refusal(DrainingError, "the daemon is shutting down")
_DEAD = Refusal(EngineDeadError, "the engine has died")
_ASLEEP = Refusal(EngineSleepingError, "the engine sleeps; wake it up first")
_TAINTED = Refusal(
    EngineTaintedError, "the weights could not be proven consistent: push a full version or restart the daemon"
)

RULES: Mapping[Phase, Rules] = {
    Phase.STARTING: Rules(False, admission=_STARTING, control=_STARTING),
    Phase.RUNNING: Rules(True),
    Phase.PAUSED: Rules(True),
    Phase.APPLYING: Rules(True),
    # A full push heals a tainted engine, so control calls pass.
    Phase.TAINTED: Rules(False, admission=_TAINTED),
    Phase.SLEEPING: Rules(False, admission=_ASLEEP, control=_ASLEEP),
    Phase.DRAINING: Rules(False, admission=_DRAINING, control=_DRAINING),
    Phase.DEAD: Rules(False, admission=_DEAD, control=_DEAD),
}
