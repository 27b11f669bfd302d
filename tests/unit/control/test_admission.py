"""Which phases take requests, and what health says of them."""

import pytest

from genserve.control.admission import check_admission, is_serving
from genserve.control.state import Phase
from genserve.errors import DrainingError, EngineDeadError, EngineSleepingError, EngineTaintedError, GenserveError

REFUSALS: dict[Phase, type[GenserveError]] = {
    Phase.STARTING: DrainingError,
    Phase.TAINTED: EngineTaintedError,
    Phase.SLEEPING: EngineSleepingError,
    Phase.DRAINING: DrainingError,
    Phase.DEAD: EngineDeadError,
}


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_takes_requests_exactly_when_health_says_serving(phase: Phase) -> None:
    """A load balancer and the daemon itself agree; paused and applying engines let requests wait."""
    assert is_serving(phase) == (phase in (Phase.RUNNING, Phase.PAUSED, Phase.APPLYING))
    if is_serving(phase):
        check_admission(phase)
    else:
        with pytest.raises(REFUSALS[phase]):
            check_admission(phase)
