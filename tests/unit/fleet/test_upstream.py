"""What a call to a replica raises."""

import re
from pathlib import Path

import grpc
import grpc.aio
import pytest

from genserve import fleet
from genserve.errors import DeadlineError, GenserveError, MessageTooLargeError, QueueFullError, UnavailableError
from genserve.fleet.member import Member
from genserve.fleet.upstream import ASK_S, Upstream, apply_s, load_lora_s, pause_s, prepared_ttl_s
from genserve.rpc.status import to_status
from genserve.security.caller import Caller
from genserve.v1 import control_pb2, weights_pb2
from genserve.wire.conversions import duration_of

NO_METADATA = grpc.aio.Metadata()


async def raised(error: grpc.aio.AioRpcError) -> GenserveError:
    """What becomes of an error of gRPC."""
    upstream = Upstream(Member("127.0.0.1:1"), Caller())
    try:
        with pytest.raises(GenserveError) as caught, upstream.raising():
            raise error
    finally:
        await upstream.close()
    return caught.value


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"])
async def test_a_connection_that_breaks_is_unavailable(code: str) -> None:
    """Whatever code gRPC finds for it: a trainer then sends the push again, as to a daemon."""
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], NO_METADATA, NO_METADATA, "Stream removed")
    found = await raised(error)
    assert type(found) is UnavailableError
    assert "127.0.0.1:1" in found.message and "Stream removed" in found.message


@pytest.mark.parametrize(
    ("code", "kind"), [("DEADLINE_EXCEEDED", DeadlineError), ("RESOURCE_EXHAUSTED", MessageTooLargeError)]
)
async def test_a_call_that_takes_too_long_or_too_much_is_not(code: str, kind: type[GenserveError]) -> None:
    """gRPC's other refusals mean what they say."""
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], NO_METADATA, NO_METADATA, "x")
    assert type(await raised(error)) is kind


@pytest.mark.parametrize("kind", [GenserveError, QueueFullError])
async def test_what_a_daemon_says_stays(kind: type[GenserveError]) -> None:
    """Its own INTERNAL is no broken connection."""
    status = to_status(kind("its words"))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    found = await raised(grpc.aio.AioRpcError(status.code, NO_METADATA, trailing, status.details))
    assert type(found) is kind
    assert found.message == "its words"


_CALL = re.compile(r"\.(?:weights|control|generation)\.[A-Z]\w+\(")
_WATCHED = "upstream.control.WatchStatus("


def test_no_call_goes_to_a_replica_without_a_deadline() -> None:
    """`Upstream.ask` demands one. Each report of a watch has its own."""
    assert fleet.__file__ is not None
    found = [
        line.strip()
        for path in Path(fleet.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if _CALL.search(line)
    ]
    assert len(found) == 1 and _WATCHED in found[0]


@pytest.mark.parametrize(("asked_s", "expected_s"), [(None, 330.0), (0.0, 330.0), (7.0, 37.0)])
def test_a_push_has_the_time_that_its_header_gives_it(asked_s: float | None, expected_s: float) -> None:
    """And some, for the replica's own error; by default the daemon's time."""
    timeout = None if asked_s is None else duration_of(asked_s)
    assert apply_s(weights_pb2.ApplyOptions(timeout=timeout)) == expected_s


def test_others_have_the_daemons_defaults() -> None:
    """A pause and a sleep, an adapter, and a version that is prepared."""
    assert pause_s(control_pb2.PauseRequest()) == pause_s(control_pb2.SleepRequest()) == 60 + ASK_S
    assert pause_s(control_pb2.PauseRequest(timeout=duration_of(3))) == 3 + ASK_S
    assert load_lora_s(control_pb2.LoadLoraRequest()) == 60 + ASK_S
    assert load_lora_s(control_pb2.LoadLoraRequest(timeout=duration_of(4))) == 4 + ASK_S
    assert prepared_ttl_s(weights_pb2.PushHeader()) == 60
    assert prepared_ttl_s(weights_pb2.PushHeader(prepared_ttl=duration_of(5))) == 5
