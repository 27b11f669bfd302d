"""What a call to a replica raises."""

import grpc
import grpc.aio
import pytest

from genserve.errors import DeadlineError, GenserveError, MessageTooLargeError, QueueFullError, UnavailableError
from genserve.fleet.member import Member
from genserve.fleet.upstream import Upstream
from genserve.rpc.status import to_status
from genserve.security.caller import Caller

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
