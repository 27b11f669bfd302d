"""What every pair of conditions means: the phase that is told, health, refusals, and whether the engine may run."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.control.conditions import (
    RULES,
    DaemonCondition,
    EngineCondition,
    Phase,
    check_alive,
    check_control,
    check_generation,
    check_untainted,
    check_weights,
    condition_of,
    may_run,
    phase_of,
)
from genserve.engine.types import SleepTag
from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError, GenserveError
from tests.support.refusals import refuses

Error = type[GenserveError] | None

# engine, daemon -> the phase told, whether health serves, what requests, pauses, and pushes and adapters raise
SERVING: dict[EngineCondition, tuple[Phase, bool, Error, Error, Error]] = {
    EngineCondition.RUNNING: (Phase.RUNNING, True, None, None, None),
    EngineCondition.PAUSED: (Phase.PAUSED, True, None, None, None),
    EngineCondition.APPLYING: (Phase.APPLYING, True, None, None, None),
    EngineCondition.ASLEEP: (Phase.SLEEPING, False, EngineSleepingError, EngineSleepingError, EngineSleepingError),
    EngineCondition.WEIGHTS_AWAKE: (Phase.SLEEPING, False, EngineSleepingError, EngineSleepingError, None),
    EngineCondition.TAINTED: (Phase.TAINTED, False, EngineTaintedError, None, None),
    EngineCondition.DEAD: (Phase.DEAD, False, EngineDeadError, EngineDeadError, EngineDeadError),
}
CAUSE = "EngineCore was ended by SIGKILL"
MAY_RUN = {EngineCondition.RUNNING, EngineCondition.PAUSED}


def board(
    phase: Phase,
    engine: EngineCondition = EngineCondition.RUNNING,
    daemon: DaemonCondition = DaemonCondition.SERVING,
) -> Any:
    """What checks read of a state board."""
    return SimpleNamespace(phase=phase, engine_condition=engine, daemon_condition=daemon, cause_of_death=CAUSE)


@pytest.mark.parametrize(("engine", "daemon"), list(itertools.product(EngineCondition, DaemonCondition)))
def test_every_pair_of_conditions_has_one_meaning(engine: EngineCondition, daemon: DaemonCondition) -> None:
    """A dead engine comes first, then a daemon that starts or ends; but neither hides from the daemon itself that the
    engine may not run."""
    phase, serves, admission, control, weights = SERVING[engine]
    if daemon is not DaemonCondition.SERVING and engine is not EngineCondition.DEAD:
        phase, serves, admission, control, weights = Phase[daemon.name], False, *(3 * (DrainingError,))
    told = phase_of(engine, daemon)
    assert told is phase
    assert RULES[told].serves is serves
    seen = board(told, engine, daemon)
    assert raised_by(check_generation, seen) is admission
    assert raised_by(check_control, seen) is control
    assert raised_by(check_weights, seen) is weights
    assert raised_by(check_alive, seen) is (EngineDeadError if engine is EngineCondition.DEAD else None)
    assert may_run(engine) is (engine in MAY_RUN)


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_takes_requests_exactly_when_health_says_serving(phase: Phase) -> None:
    """A load balancer and the daemon itself agree; paused and applying engines let requests wait."""
    assert RULES[phase].serves == (raised_by(check_generation, board(phase)) is None)


@pytest.mark.parametrize("engine", EngineCondition)
def test_only_a_tainted_engine_is_unsound(engine: EngineCondition) -> None:
    """It takes a push, and nothing that trusts its weights."""
    if engine is EngineCondition.TAINTED:
        with pytest.raises(EngineTaintedError):
            check_untainted(engine)
    else:
        check_untainted(engine)


EVERY_SLEEP = [frozenset(tags) for size in range(4) for tags in itertools.combinations(SleepTag, size)]


@pytest.mark.parametrize("asleep", EVERY_SLEEP)
@pytest.mark.parametrize("entered", [None, EngineCondition.APPLYING, EngineCondition.TAINTED, EngineCondition.DEAD])
@pytest.mark.parametrize("is_paused", [False, True])
def test_what_is_asleep_decides_unless_the_engine_is_dead_or_tainted(
    asleep: frozenset[SleepTag], entered: EngineCondition | None, is_paused: bool
) -> None:
    """A commit while it sleeps is told as sleep: requests are refused, and do not wait as they would for a commit."""
    expected = EngineCondition.PAUSED if is_paused else EngineCondition.RUNNING
    if entered in (EngineCondition.TAINTED, EngineCondition.DEAD):
        expected = entered
    elif asleep:
        awake = SleepTag.WEIGHTS not in asleep
        expected = EngineCondition.WEIGHTS_AWAKE if awake else EngineCondition.ASLEEP
    elif entered is not None:
        expected = entered
    assert condition_of(entered, asleep, is_paused=is_paused) is expected


def test_a_push_into_sleeping_weights_is_told_what_to_wake_up() -> None:
    """The error names the call."""
    with refuses(EngineSleepingError, says="WakeUp{tags: weights}"):
        check_weights(board(Phase.SLEEPING, EngineCondition.ASLEEP))


@pytest.mark.parametrize("check", [check_generation, check_control, check_weights, check_alive])
def test_only_the_refusal_of_a_dead_engine_names_the_cause(check: Callable[..., None]) -> None:
    """Where an engine has died while the daemon drains or the engine slept, the phase says that it has died."""
    with refuses(EngineDeadError, says=CAUSE):
        check(board(Phase.DEAD, EngineCondition.DEAD))
    for phase, condition in ((Phase.DRAINING, EngineCondition.RUNNING), (Phase.SLEEPING, EngineCondition.ASLEEP)):
        try:
            check(board(phase, condition))
        except GenserveError as error:
            assert CAUSE not in error.message


def raised_by(check: Callable[..., None], *conditions: object) -> Error:
    """The class of what a check raises; None if nothing."""
    try:
        check(*conditions)
    except GenserveError as error:
        return type(error)
    return None


@pytest.mark.parametrize("phase", Phase)
def test_only_a_start_is_worth_waiting_for(phase: Phase) -> None:
    """Clients come again after a second; what else refuses does not end by itself."""
    for refusal in (RULES[phase].generation, RULES[phase].control):
        assert refusal is None or refusal().retry_after_s == (1.0 if phase is Phase.STARTING else None)
