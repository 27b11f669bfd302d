"""Which errors say that a replica is gone, and which that it may have done what it was asked."""

import grpc
import pytest
from google.rpc import status_pb2

from genserve.client.transport.errors import error_of_status
from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    UnavailableError,
    all_errors,
)
from genserve.fleet.loss import is_lost, may_have_done
from genserve.rpc.status import to_message


def received(code: grpc.StatusCode) -> GenserveError:
    """A status without details, as gRPC itself makes it."""
    return error_of_status(status_pb2.Status(code=code.value[0], message="Stream removed"), "there")


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


def test_how_a_connection_breaks_is_a_loss() -> None:
    """Whatever code gRPC finds for it; but neither a deadline nor a message that is too large."""
    broken = {code for code in grpc.StatusCode if code is not grpc.StatusCode.OK and is_lost(received(code))}
    assert broken == {getattr(grpc.StatusCode, name) for name in ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN")}
    assert not is_lost(InvalidFieldError("x"))


def test_a_connection_that_breaks_or_takes_too_long_has_not_answered() -> None:
    """A push that was being committed then must not look as if nothing had changed."""
    unknown = {code for code in grpc.StatusCode if code is not grpc.StatusCode.OK and may_have_done(received(code))}
    names = ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")
    assert unknown == {getattr(grpc.StatusCode, name) for name in names}
