"""The conditions of the engine and of the daemon, and what follows from both: what calls are refused. Pure.

The two conditions are separate because one must not hide the other: a draining daemon still has to know that its engine
is tainted. Clients see one `Phase` for the pair, and the phase decides what they are refused. There is one exception: a
sleeping engine accepts pushes and adapters once its weights are awake. What the daemon itself may do to the engine
depends only on the engine's condition.
"""

import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from genserve.engine.types import SleepTag
from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError, GenserveError


class EngineCondition(enum.Enum):
    """What the engine is doing. The pause leases decide between RUNNING and PAUSED. The parts that are asleep decide
    between ASLEEP and WEIGHTS_AWAKE, which is asleep except for the weights. The others are entered and left."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    APPLYING = "APPLYING"
    ASLEEP = "ASLEEP"
    WEIGHTS_AWAKE = "WEIGHTS_AWAKE"
    TAINTED = "TAINTED"
    DEAD = "DEAD"


class DaemonCondition(enum.Enum):
    """How far the daemon is between its start and its end."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"


class Phase(enum.Enum):
    """What clients see. The values are the names of genserve.v1.Phase without their prefix."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    APPLYING = "APPLYING"
    TAINTED = "TAINTED"
    SLEEPING = "SLEEPING"
    DRAINING = "DRAINING"
    DEAD = "DEAD"


_SLEEPING = frozenset({EngineCondition.ASLEEP, EngineCondition.WEIGHTS_AWAKE})


def condition_of(entered: EngineCondition | None, asleep: Set[SleepTag], *, is_paused: bool) -> EngineCondition:
    """The condition of an engine, from the condition that it entered (None = none) and the parts that are asleep.

    DEAD and TAINTED take precedence over sleep, because no wake-up ends them. APPLYING does not, because callers wait
    for the end of an exchange, but not for a wake-up.
    """
    if entered in (EngineCondition.DEAD, EngineCondition.TAINTED):
        return entered
    if asleep:
        return EngineCondition.ASLEEP if SleepTag.WEIGHTS in asleep else EngineCondition.WEIGHTS_AWAKE
    if entered is not None:
        return entered
    return EngineCondition.PAUSED if is_paused else EngineCondition.RUNNING


def phase_of(engine: EngineCondition, daemon: DaemonCondition) -> Phase:
    """The phase of a pair: DEAD, else DRAINING, else STARTING, else what the engine is doing."""
    if engine is EngineCondition.DEAD:
        return Phase.DEAD
    if daemon is not DaemonCondition.SERVING:
        return Phase(daemon.value)
    return Phase.SLEEPING if engine in _SLEEPING else Phase(engine.value)


def may_run(engine: EngineCondition) -> bool:
    """Whether the engine may schedule requests once no pause lease is left. Nothing may be sampled from inconsistent
    weights, and a sleeping engine has no memory."""
    return engine in (EngineCondition.RUNNING, EngineCondition.PAUSED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is refused in a phase. `remedy`: what helps; `metadata`: of the error, for programs."""

    error: type[GenserveError]
    message: str
    retry_after_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    def __call__(self, detail: str = "") -> GenserveError:
        """A new error to raise. `detail`: what there is to add to the message."""
        message = f"{self.message}: {detail}" if detail else self.message
        message = f"{message}; {self.remedy}" if self.remedy else message
        return self.error(message, retry_after_s=self.retry_after_s, metadata=self.metadata)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a phase allows. `serves`: health says SERVING. `generation`: why requests are refused; None = they are
    admitted, and may have to wait. `control`: the same for pauses, pushes and adapters; see `check_weights`."""

    serves: bool
    generation: Refusal | None = None
    control: Refusal | None = None


STARTING = Refusal(
    DrainingError,
    "the engine is starting",
    retry_after_s=1.0,
    metadata={"phase": "STARTING"},
    remedy="wait until it serves (Client.wait_ready; genserve status --watch shows how far it is)",
)
_DRAINING = Refusal(DrainingError, "the daemon is shutting down")
DEAD = Refusal(EngineDeadError, "the engine has died")
_ASLEEP = Refusal(EngineSleepingError, "the engine is asleep; wake it up first (WakeUp, genserve wake-up)")
_WEIGHTS_ASLEEP = Refusal(
    EngineSleepingError,
    "the engine is asleep; wake up its weights first (WakeUp{tags: weights}, genserve wake-up --tag weights)",
)
TAINTED = Refusal(EngineTaintedError, "the weights may be inconsistent: push a complete version or restart the daemon")

RULES: Mapping[Phase, Rules] = {
    Phase.STARTING: Rules(False, generation=STARTING, control=STARTING),
    Phase.RUNNING: Rules(True),
    Phase.PAUSED: Rules(True),
    Phase.APPLYING: Rules(True),
    # A full push heals a tainted engine, so control calls pass.
    Phase.TAINTED: Rules(False, generation=TAINTED),
    Phase.SLEEPING: Rules(False, generation=_ASLEEP, control=_ASLEEP),
    Phase.DRAINING: Rules(False, generation=_DRAINING, control=_DRAINING),
    Phase.DEAD: Rules(False, generation=DEAD, control=DEAD),
}


class HasPhase(Protocol):
    """The daemon's state board, or what a front end sees of it."""

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""

    @property
    def cause_of_death(self) -> str:
        """Why the engine is dead, for people; "" while it lives."""


class HasConditions(HasPhase, Protocol):
    """The daemon's state board, which knows what the phase follows from."""

    @property
    def engine_condition(self) -> EngineCondition:
        """What the engine is doing."""


def check_control(board: HasPhase) -> None:
    """Raises the error if the phase refuses pauses. Pushes and adapters have `check_weights`."""
    if (refusal := RULES[board.phase].control) is not None:
        raise _error(refusal, board)


def check_weights(board: HasConditions) -> None:
    """Raises the error if pushes, adapters and reading the live weights are refused. TAINTED allows them: a complete
    push ends it. Sleep allows them once the weights are awake."""
    refusal = RULES[board.phase].control
    if board.phase is Phase.SLEEPING:
        refusal = None if board.engine_condition is EngineCondition.WEIGHTS_AWAKE else _WEIGHTS_ASLEEP
    if refusal is not None:
        raise _error(refusal, board)


def check_generation(board: HasPhase) -> None:
    """Raises why a request for tokens is refused in this phase; returns when it is admitted, perhaps to wait."""
    if (refusal := RULES[board.phase].generation) is not None:
        raise _error(refusal, board)


def check_alive(board: HasConditions) -> None:
    """Raises EngineDeadError if the engine is dead, whatever the daemon does."""
    if board.engine_condition is EngineCondition.DEAD:
        raise _error(DEAD, board)


def check_weights_present(weights_lost: bool) -> None:
    """Raises EngineTaintedError after a sleep of level 2 has dropped the weights, until a version is applied. For calls
    that read the weights."""
    if weights_lost:
        raise EngineTaintedError(
            "a sleep of level 2 dropped the weights, and no version was applied since: push one, or wake up the rest, "
            "which restores the served version"
        )


def check_untainted(engine: EngineCondition) -> None:
    """Raises EngineTaintedError while the live weights may be inconsistent. For calls that need consistent weights."""
    if engine is EngineCondition.TAINTED:
        raise TAINTED()


def _error(refusal: Refusal, board: HasPhase) -> GenserveError:
    return refusal(board.cause_of_death if refusal is DEAD else "")
