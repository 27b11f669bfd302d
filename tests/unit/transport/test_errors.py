"""What failed calls raise."""

import asyncio
import gc
import weakref
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from genserve.client import AsyncClient, UnavailableError
from genserve.errors import (
    DeadlineError,
    GenserveError,
    InvalidFieldError,
    MessageTooLargeError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
    UnsupportedError,
    all_errors,
)
from genserve.transport.errors import error_of, error_of_status
from tests.support.patience import until
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse

UNCONNECTED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "


async def test_a_reason_becomes_its_class_with_the_violations(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """BadRequest arrives as field paths, the status message as the message."""

    async def fail(context: Any) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be above 0")
        details = error_details_pb2.BadRequest(field_violations=[violation])
        await refuse(context, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "bad top_p", details)

    daemon.fail = fail
    with refuses(InvalidFieldError, says="bad top_p") as raised:
        await client.generate("x", top_p=0)
    (violation,) = raised.value.violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must be above 0")


async def test_retry_info_and_metadata_are_kept(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """When to try again is in seconds; what is for programs stays a dict."""

    async def fail(context: Any) -> None:
        retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
        await refuse(context, code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry, waiting="9")

    daemon.fail = fail
    with pytest.raises(QueueFullError) as raised:
        await client.status()
    assert raised.value.retry_after_s == 1.5
    assert raised.value.metadata == {"waiting": "9"}


@pytest.mark.parametrize("error", sorted(all_errors(), key=lambda error: error.reason))
async def test_every_reason_of_the_contract_is_raised_again(
    error: type[GenserveError], daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """The class on this side is the class on that side, whatever the code."""

    async def fail(context: Any) -> None:
        await refuse(context, code_pb2.ABORTED, error.reason, "no")

    daemon.fail = fail
    with pytest.raises(GenserveError) as raised:
        await client.status()
    assert type(raised.value) is error


async def test_a_reason_of_a_newer_daemon_is_kept_in_the_metadata(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """An unknown reason is the base class, with reason and code for programs."""

    async def fail(context: Any) -> None:
        await refuse(context, code_pb2.ABORTED, "TOO_MODERN", "no")

    daemon.fail = fail
    with pytest.raises(GenserveError) as raised:
        await client.status()
    assert raised.value.metadata == {"reason": "TOO_MODERN", "code": "ABORTED"}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, MessageTooLargeError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.CANCELLED, UnavailableError),  # by nobody here: a server that is going, or has too much to do
    ],
)
async def test_codes_that_grpc_answers_itself_are_typed(
    code: grpc.StatusCode, error: type[GenserveError], daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """gRPC and proxies answer without ErrorInfo: then the code decides."""

    async def fail(context: Any) -> None:
        await context.abort(code, "no")

    daemon.fail = fail
    with pytest.raises(error):
        await client.status()


async def test_without_a_daemon_the_error_names_the_address() -> None:
    """Nobody listens: say where."""
    async with AsyncClient("127.0.0.1:1") as client:
        with refuses(UnavailableError, says="127.0.0.1:1: Connection refused"):
            await client.status()


@pytest.mark.parametrize(
    ("answer", "access", "says"),
    [
        (b"", {}, "it may need TLS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", {"tls": True}, "or is no daemon: leave out what asks for it (tls)"),
    ],
)
async def test_a_client_with_tls_on_one_side_alone_is_told_so(
    answer: bytes, access: dict[str, bool], says: str
) -> None:
    """gRPC says how the connection ended, and not why."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        async with AsyncClient(address, **access) as client:
            with refuses(UnavailableError, says=says) as caught:
                await client.status()
    assert address in caught.value.message


async def test_a_call_past_its_deadline_says_so_in_our_own_words(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """gRPC's own words are of a stream that was removed."""

    async def fail(context: Any) -> None:
        await asyncio.Event().wait()

    daemon.fail = fail
    with refuses(DeadlineError, says=daemon.target) as raised:
        await client.status(timeout_s=0.2)
    assert "Stream removed" not in raised.value.message


async def test_a_connection_that_breaks_is_not_a_daemon_that_is_not_there() -> None:
    """A server that has accepted the call may be a front end, beside which the daemon goes on."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes.fromhex("000000040000000000"))  # a server's settings: now gRPC sends its call
        while b"/genserve.v1.ControlService/GetStatus" not in (frame := await reader.read(1 << 16)):
            assert frame != b"", "no call came"
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(address) as client:
        with refuses(UnavailableError, says=f"{address} broke: Socket closed"):
            await client.status()


@pytest.mark.parametrize(
    ("code", "details", "says"),
    [
        (code_pb2.UNAVAILABLE, "Stream removed (Socket closed)", "here:1 broke: Socket closed"),
        (code_pb2.UNAVAILABLE, "Connection reset by peer", "here:1 broke: Connection reset by peer"),
        (
            *(code_pb2.UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))"),
            "here:1 broke: Connection reset by peer",
        ),
        (code_pb2.UNAVAILABLE, "Stream removed (FD shutdown)", "here:1 broke: FD shutdown"),
        (code_pb2.UNAVAILABLE, f"{UNCONNECTED}Socket closed", "here:1: it closed the connection: it may need TLS"),
        (
            *(code_pb2.UNAVAILABLE, f"{UNCONNECTED}recvmsg:Connection reset by peer (104)"),
            "here:1: it closed the connection: it may need TLS",
        ),
        (code_pb2.CANCELLED, "CANCELLED", "here:1 has ended the call"),
        (code_pb2.UNAVAILABLE, "no healthy upstream", "here:1: no healthy upstream"),
        (code_pb2.DEADLINE_EXCEEDED, "Deadline Exceeded", "here:1"),
        (code_pb2.DEADLINE_EXCEEDED, "", "here:1"),
        (code_pb2.DEADLINE_EXCEEDED, "upstream request timeout", "upstream request timeout"),
    ],
)
def test_only_words_of_grpc_itself_are_replaced(code: int, details: str, says: str) -> None:
    """Those of a proxy may tell more than ours."""
    message = error_of_status(status_pb2.Status(code=code, message=details), "here:1").message
    assert says in message
    assert "Stream removed" not in message and "Deadline Exceeded" not in message


async def test_details_that_are_none_hide_neither_code_nor_message(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Of a proxy, which may put anything into the trailer."""

    async def fail(context: Any) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not from here")

    daemon.fail = fail
    with refuses(PermissionDeniedError, says="not from here"):
        await client.status()


async def test_a_call_that_the_server_does_not_have_is_unsupported(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Such as those of a fleet, which only a router has."""
    with refuses(UnsupportedError, says=daemon.target):
        await client.list_replicas()


@pytest.mark.parametrize(
    ("code", "error", "metadata"),
    [
        (code_pb2.RESOURCE_EXHAUSTED, MessageTooLargeError, {}),
        (code_pb2.PERMISSION_DENIED, PermissionDeniedError, {}),
        (code_pb2.DATA_LOSS, GenserveError, {"code": "DATA_LOSS"}),
        (99, GenserveError, {"code": "UNKNOWN"}),
    ],
)
def test_a_status_in_a_message_is_an_error_as_that_of_a_call(
    code: int, error: type[GenserveError], metadata: dict[str, str]
) -> None:
    """By its code where it has no reason; a code that nobody knows is an error still."""
    found = error_of_status(status_pb2.Status(code=code, message="no"), "here:1")
    assert (type(found), found.message, dict(found.metadata)) == (error, "no", metadata)
    unsaid = error_of_status(status_pb2.Status(code=code_pb2.UNAVAILABLE), "here:1")
    assert "here:1: UNAVAILABLE" in unsaid.message


def test_other_metadata_are_no_details() -> None:
    """Whatever they are, and whatever comes first."""
    status = status_pb2.Status(code=code_pb2.ABORTED, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=QueueFullError.reason, domain="genserve"))
    key = "grpc-status-details-bin"
    details = (key, status.SerializeToString())
    for trailing in ([details], [("x-bin", b"\xff"), details], [details, ("x-bin", b"\xff")], [("a", "b"), details]):
        call = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing))
        assert type(error_of(call, "here:1")) is QueueFullError
    for other in ([], [("x-bin", b"\xff")], [(key, "text")]):
        call = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata(*other))
        assert (type(error_of(call, "here:1")), error_of(call, "here:1").metadata) == (
            GenserveError,
            {"code": "ABORTED"},
        )


def test_a_reason_of_another_domain_is_none_of_ours() -> None:
    """A proxy may have its own, before ours, after it, or alone."""
    ours = error_details_pb2.ErrorInfo(reason=QueueFullError.reason, domain="genserve", metadata={"waiting": "9"})
    theirs = error_details_pb2.ErrorInfo(reason="RATE_LIMIT", domain="proxy", metadata={"zone": "1"})

    def found(*details: error_details_pb2.ErrorInfo) -> GenserveError:
        status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="no")
        for each in details:
            status.details.add().Pack(each)
        return error_of_status(status, "here:1")

    for details in ((ours,), (ours, theirs), (theirs, ours)):
        error = found(*details)
        assert (type(error), error.metadata) == (QueueFullError, {"waiting": "9"})
    alone = found(theirs)
    assert (type(alone), alone.metadata) == (MessageTooLargeError, {})


@pytest.mark.parametrize("call", ["status", "generate", "pull_weights"])
async def test_an_error_is_freed_when_it_is_forgotten(daemon: ScriptedDaemon, client: AsyncClient, call: str) -> None:
    """And gRPC's with it, without the garbage collector: they came through frames that hold the call."""
    daemon.fail = lambda context: refuse(context, code_pb2.ABORTED, "QUEUE_FULL", "full")

    gc.disable()
    try:
        seen: list[weakref.ref[BaseException]] = []
        try:
            await getattr(client, call)(*(["x"] if call == "generate" else []))
        except GenserveError as error:
            assert error.__cause__ is not None
            seen += map(weakref.ref, (error, error.__cause__))
        await until(lambda: all(each() is None for each in seen))
        assert len(seen) == 2
    finally:
        gc.enable()
