"""What a client is given to reach a daemon, and for how long."""

import asyncio
import math
from typing import Any

import grpc
import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, MessageTooLargeError, UnavailableError
from genserve.transport.connection import UNSET, Connection
from genserve.transport.errors import ClientClosedError, ClientMisuseError
from genserve.transport.timeouts import Timeouts
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "'' is not an address"),
        ("a\nb:1", "is not an address"),
        ("\ud800:1", "is not an address"),
        ("http://127.0.0.1:50051", "HOST:PORT"),
        ("https://replica:50051", "HOST:PORT"),
        ("replica", "HOST:PORT"),
        ("replica:", "HOST:PORT"),
        ("replica:port", "HOST:PORT"),
        ("dns:///replica:0", "HOST:PORT"),
        ("[::1]:65536", "HOST:PORT"),
        (50051, "int"),
        (b"replica:1", "bytes"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(target: Any, says: str) -> None:
    """gRPC would look for a host of that name until the deadline."""
    with refuses(InvalidFieldError, field="target", says=says):
        Connection(target)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "[::1]:65535",
        "dns:///replica:1",
        "unix:/run/genserve:x",
        "httpd:1",
        "ipv4:127.0.0.1:1,127.0.0.2:1",
    ],
)
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
    with refuses(InvalidFieldError, field=field) as caught:
        Connection("127.0.0.1:1", **settings)
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
    with refuses(InvalidFieldError, field="timeout_s"):
        Connection.grpc_timeout_s(timeout_s, 5.0)


def test_every_call_has_a_deadline_by_default() -> None:
    """None of them is without one, and bytes and tokens get more time than the rest."""
    timeouts = Timeouts()
    assert timeouts.control_s is not None and timeouts.push_s is not None and timeouts.generate_s is not None
    assert timeouts.control_s < min(timeouts.push_s, timeouts.generate_s)


@pytest.mark.parametrize("with_own", [False, True])
@pytest.mark.parametrize("tls", [False, True])
async def test_the_caller_s_credentials_are_those_of_the_channel(
    monkeypatch: pytest.MonkeyPatch, tls: bool, with_own: bool
) -> None:
    """Also where TLS is asked for besides. With neither, the channel is plaintext."""
    own = grpc.ssl_channel_credentials() if with_own else None
    used: list[grpc.ChannelCredentials] = []
    secure_channel = grpc.aio.secure_channel

    def secured(target: str, credentials: grpc.ChannelCredentials, **options: Any) -> grpc.aio.Channel:
        used.append(credentials)
        return secure_channel(target, credentials, **options)

    monkeypatch.setattr(grpc.aio, "secure_channel", secured)
    connection = Connection("127.0.0.1:1", tls=tls, credentials=own)
    assert connection.channel is connection.channel
    await connection.close()
    if with_own:
        assert used == [own]
    else:
        assert len(used) == int(tls) and None not in used


async def test_the_caller_s_options_override_those_of_the_client(daemon: ScriptedDaemon) -> None:
    """Without them an answer may have any size."""
    daemon.words = ["x" * (5 << 20)]
    async with AsyncClient(daemon.target) as client:
        assert len((await client.generate("x")).text) == 5 << 20
    async with AsyncClient(daemon.target, options=[("grpc.max_receive_message_length", 1000)]) as client:
        with pytest.raises(MessageTooLargeError):
            await client.generate("x")


async def test_a_client_has_a_connection_of_its_own_and_no_proxy(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push does not delay another client's generation; a proxy is for the web."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    peers: list[str] = []

    async def remember(context: Any) -> None:
        peers.append(context.peer())

    daemon.fail = remember
    async with AsyncClient(daemon.target) as one, AsyncClient(daemon.target) as other:
        for client in (one, other, one):
            await client.status()
    assert len(set(peers)) == 2 and peers[0] == peers[2]


async def test_what_is_to_be_done_at_the_end_is_done_once() -> None:
    """Whether a call was made or not, however often it is closed."""
    for is_used in (False, True):
        connection, done = Connection("127.0.0.1:1"), list[str]()
        connection.on_close(lambda done=done: done.append("one"))  # type: ignore[misc]
        connection.on_close(lambda done=done: done.append("other"))  # type: ignore[misc]
        if is_used:
            assert connection.channel is not None
        await connection.close()
        await connection.close()
        assert sorted(done) == ["one", "other"]


async def test_closing_closes_the_further_connections(daemon: ScriptedDaemon) -> None:
    """To the daemon by default."""
    connection = Connection(daemon.target)
    channels = [connection.channel, connection.another_channel(), connection.another_channel(daemon.target)]
    assert len({id(each) for each in channels}) == 3
    for each in channels:
        await each.channel_ready()
    await connection.close()
    assert [each.get_state() for each in channels] == [grpc.ChannelConnectivity.SHUTDOWN] * 3


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """As gRPC raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="said")


def raised_as(connection: Connection, error: BaseException) -> BaseException:
    """What an error becomes that is raised inside a call."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011, SIM117
        with connection.typed_errors():
            raise error
    return caught.value


async def test_errors_of_grpc_are_typed_and_those_of_a_closed_client_say_so() -> None:
    """Whoever cancels the task means it, closed or not."""
    connection = Connection("127.0.0.1:1")
    refused, misused, cancelled = (
        rpc_error(grpc.StatusCode.UNAVAILABLE),
        grpc.aio.UsageError(),
        asyncio.CancelledError(),
    )
    typed = raised_as(connection, refused)
    assert isinstance(typed, UnavailableError) and typed.__cause__ is refused
    assert "127.0.0.1:1" in typed.message and "said" in typed.message
    assert raised_as(connection, misused) is misused
    assert raised_as(connection, cancelled) is cancelled
    await connection.close()
    for error in (misused, cancelled):
        assert isinstance(raised_as(connection, error), ClientClosedError)
    assert isinstance(raised_as(connection, refused), UnavailableError)

    async def cancelled_task() -> None:
        with connection.typed_errors():
            await asyncio.Event().wait()

    task = asyncio.create_task(cancelled_task())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def use(connection: Connection) -> None:
    """Opens it on the running loop."""
    assert connection.channel is not None


async def test_a_connection_is_closed_on_its_own_loop_or_when_that_has_ended() -> None:
    """On another one it stays open."""
    connection, done = Connection("127.0.0.1:1"), list[str]()
    connection.on_close(lambda: done.append("closed"))
    assert connection.channel is not None
    with pytest.raises(ClientMisuseError, match="loop"):
        await asyncio.to_thread(asyncio.run, connection.close())
    with pytest.raises(ClientMisuseError, match="loop"):
        await asyncio.to_thread(asyncio.run, use(connection))
    connection.check_open()
    assert done == []
    await connection.close()
    assert done == ["closed"]

    left = Connection("127.0.0.1:1")
    left.on_close(lambda: done.append("left"))
    await asyncio.to_thread(asyncio.run, use(left))
    await left.close()
    assert done == ["closed", "left"]
    with pytest.raises(ClientClosedError):
        left.check_open()
