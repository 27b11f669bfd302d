"""What a client is given to reach a daemon, and for how long."""

import math
from typing import Any

import pytest

from genserve.client.transport.connection import UNSET, Connection, Timeouts
from genserve.errors import InvalidFieldError


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "'' is not an address"),
        ("a\nb:1", "is not an address"),
        ("\ud800:1", "is not an address"),
        ("http://127.0.0.1:50051", "is not an address of gRPC: write HOST:PORT"),
        ("https://replica:50051", "is not an address of gRPC: write HOST:PORT"),
        ("replica", "'replica' has no port: write HOST:PORT"),
        (50051, "and not int"),
        (b"replica:1", "and not bytes"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(target: Any, says: str) -> None:
    """gRPC would look for a host of that name until the deadline."""
    with pytest.raises(InvalidFieldError) as caught:
        Connection(target)
    (violation,) = caught.value.violations
    assert violation.field == "target"
    assert says in violation.description


@pytest.mark.parametrize("target", ["127.0.0.1:1", "[::1]:1", "dns:///replica:1", "unix:/run/genserve", "httpd:1"])
def test_addresses_of_grpc_are_taken_as_they_are(target: str) -> None:
    """A host may be called as a scheme begins."""
    assert Connection(target).target == target


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"metadata": {"a b": "x"}}, "metadata"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"metadata": {"x-run": "ä"}}, "metadata.x-run"),
        ({"metadata": {"x-run": "a\nb"}}, "metadata.x-run"),
        ({"metadata": {"x-run": 7}}, "metadata.x-run"),
        ({"token": "secret\n"}, "token"),
    ],
)
def test_metadata_that_grpc_would_not_send_is_named_and_not_shown(settings: dict[str, Any], field: str) -> None:
    """It may be a secret."""
    with pytest.raises(InvalidFieldError) as caught:
        Connection("127.0.0.1:1", **settings)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert "secret" not in str(caught.value)


def test_metadata_are_sent_in_lower_case_with_the_token() -> None:
    """As HTTP/2 has them; what ends in -bin may be any bytes."""
    metadata: dict[str, Any] = {"X-Run": "7 ~", "x-bin": b"\xff"}
    connection = Connection("127.0.0.1:1", metadata=metadata, token="t")
    assert connection.metadata == (("x-run", "7 ~"), ("x-bin", b"\xff"), ("authorization", "Bearer t"))
    assert Connection("127.0.0.1:1").metadata == ()


@pytest.mark.parametrize(
    ("timeout_s", "default_s", "grpc_timeout_s"),
    [
        (UNSET, 5.0, 5.0),
        (UNSET, None, None),
        (None, 5.0, None),
        (2, 5.0, 2.0),
        (0, 5.0, 0.0),
        (1e9, 5.0, 1e9),
        (1.1e9, 5.0, None),
        (math.inf, 5.0, None),
    ],
)
def test_a_timeout_is_the_caller_s_or_the_client_s(
    timeout_s: Any, default_s: Any, grpc_timeout_s: float | None
) -> None:
    """None has to be asked for. What is decades away overflows in gRPC, into the past."""
    assert Connection.grpc_timeout_s(timeout_s, default_s) == grpc_timeout_s


@pytest.mark.parametrize("timeout_s", [math.nan, "1", [], 1j])
def test_what_is_no_time_is_refused_by_its_name(timeout_s: Any) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidFieldError) as caught:
        Connection.grpc_timeout_s(timeout_s, 5.0)
    assert caught.value.violations[0].field == "timeout_s"


def test_every_call_has_a_deadline_by_default() -> None:
    """None of them is without one, and bytes and tokens get more time than the rest."""
    timeouts = Timeouts()
    assert timeouts.control_s is not None and timeouts.push_s is not None and timeouts.generate_s is not None
    assert timeouts.control_s < min(timeouts.push_s, timeouts.generate_s)
