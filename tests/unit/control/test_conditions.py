"""What every pair of conditions means: the phase that is told, health, refusals, and whether the engine may run."""

import itertools
from collections.abc import Callable

import pytest

from genserve.control.admission import check_admission, check_control, check_sound
from genserve.control.conditions import RULES, DaemonCondition, EngineCondition, Phase, may_run, phase_of
from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError, GenserveError

Error = type[GenserveError] | None

# engine, daemon -> the phase told, whether health serves, what admission raises, what control calls raise
SERVING: dict[EngineCondition, tuple[Phase, bool, Error, Error]] = {
    EngineCondition.RUNNING: (Phase.RUNNING, True, None, None),
    EngineCondition.PAUSED: (Phase.PAUSED, True, None, None),
    EngineCondition.APPLYING: (Phase.APPLYING, True, None, None),
    EngineCondition.ASLEEP: (Phase.SLEEPING, False, EngineSleepingError, EngineSleepingError),
    EngineCondition.TAINTED: (Phase.TAINTED, False, EngineTaintedError, None),
    EngineCondition.DEAD: (Phase.DEAD, False, EngineDeadError, EngineDeadError),
}
MAY_RUN = {EngineCondition.RUNNING, EngineCondition.PAUSED}


@pytest.mark.parametrize(("engine", "daemon"), list(itertools.product(EngineCondition, DaemonCondition)))
def test_every_pair_of_conditions_has_one_meaning(engine: EngineCondition, daemon: DaemonCondition) -> None:
    """A dead engine comes first, then a daemon that starts or ends; but neither hides from the daemon itself that the
    engine may not run."""
    phase, serves, admission, control = SERVING[engine]
    if daemon is not DaemonCondition.SERVING and engine is not EngineCondition.DEAD:
        phase, serves, admission, control = Phase[daemon.name], False, DrainingError, DrainingError
    told = phase_of(engine, daemon)
    assert told is phase
    assert RULES[told].serves is serves
    assert raised_by(check_admission, told) is admission
    assert raised_by(check_control, told) is control
    assert may_run(engine) is (engine in MAY_RUN)


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_takes_requests_exactly_when_health_says_serving(phase: Phase) -> None:
    """A load balancer and the daemon itself agree; paused and applying engines let requests wait."""
    assert RULES[phase].serves == (raised_by(check_admission, phase) is None)


@pytest.mark.parametrize("engine", EngineCondition)
def test_only_a_tainted_engine_is_unsound(engine: EngineCondition) -> None:
    """It takes a push, and nothing that trusts its weights."""
    if engine is EngineCondition.TAINTED:
        with pytest.raises(EngineTaintedError):
            check_sound(engine)
    else:
        check_sound(engine)


def raised_by(check: Callable[[Phase], None], phase: Phase) -> Error:
    """The class of what a check raises; None if nothing."""
    try:
        check(phase)
    except GenserveError as error:
        return type(error)
    return None
