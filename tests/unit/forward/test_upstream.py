"""Which errors say that a replica is gone, and which that it may have done what it was asked."""

import pytest

from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    GenserveError,
    UnavailableError,
    all_errors,
)
from genserve.forward.upstream import is_lost, may_have_done
from genserve.rpc.status import to_message
from genserve.transport.errors import error_of_status


@pytest.mark.parametrize("kind", [GenserveError, *all_errors()])
def test_what_a_daemon_says_is_no_loss_unless_it_goes(kind: type[GenserveError]) -> None:
    """Its own faults pass on as they are."""
    error = error_of_status(to_message(kind("x")), "there")
    assert is_lost(error) == (kind in (UnavailableError, DrainingError, EngineDeadError))


@pytest.mark.parametrize("kind", [GenserveError, *all_errors()])
def test_what_a_daemon_says_is_an_answer_unless_it_gave_up(kind: type[GenserveError]) -> None:
    """One that is about to go has done nothing; one whose time was over may have."""
    error = error_of_status(to_message(kind("x")), "there")
    assert may_have_done(error) == (kind in (UnavailableError, DeadlineError, EngineDeadError))
