"""Which errors say that a replica is gone."""

import grpc
import pytest
from google.rpc import status_pb2

from genserve.client.forward.attempts import is_lost
from genserve.client.transport.errors import error_of_status
from genserve.errors import (
    DrainingError,
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    UnavailableError,
    all_errors,
)
from genserve.rpc.status import to_message


def received(code: grpc.StatusCode) -> GenserveError:
    """A status without details, as gRPC itself makes it."""
    return error_of_status(status_pb2.Status(code=code.value[0], message="Stream removed"), "there")


@pytest.mark.parametrize("kind", [GenserveError, *all_errors()])
def test_what_a_daemon_says_is_no_loss_unless_it_goes(kind: type[GenserveError]) -> None:
    """Its own faults pass on as they are."""
    error = error_of_status(to_message(kind("x")), "there")
    assert is_lost(error) == (kind in (UnavailableError, DrainingError, EngineDeadError))


def test_how_a_connection_breaks_is_a_loss() -> None:
    """Whatever code gRPC finds for it; but neither a deadline nor a message that is too large."""
    broken = {code for code in grpc.StatusCode if code is not grpc.StatusCode.OK and is_lost(received(code))}
    assert broken == {getattr(grpc.StatusCode, name) for name in ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN")}
    assert not is_lost(InvalidFieldError("x"))
