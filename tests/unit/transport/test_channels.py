"""Which connection a request for tokens goes over."""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from genserve.client import AsyncClient
from genserve.errors import MessageTooLargeError, UnavailableError
from genserve.security import files
from genserve.transport import channels
from genserve.transport.channels import PushChannels
from genserve.transport.connection import Connection
from genserve.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from genserve.wire.literals import FRONTEND_PORTS_KEY
from tests.support.clocks import AdvancedClock, advanced_clock
from tests.support.credentials import Authority, Pair
from tests.support.patience import STEP_S, turns
from tests.support.ports import free_port
from tests.support.refusals import refuses


class Named(control_pb2_grpc.ControlServiceServicer):
    """Says who it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse(state=types_pb2.EngineState(instance_id=self.name))


@asynccontextmanager
async def ingesting(name: str, address: str = "127.0.0.1:0") -> AsyncIterator[int]:
    """A server of that name; its port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServiceServicer_to_server(Named(name), server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(target: str, ports: Sequence[int] = ()) -> AsyncIterator[tuple[Connection, PushChannels]]:
    """A connection to the daemon, and what gives channels to its streams."""
    connection = Connection(target)
    try:
        yield connection, PushChannels(connection, ports)
    finally:
        await connection.close()


async def asked(channels: Sequence[grpc.aio.Channel]) -> list[str]:
    """Who answers on each of them."""
    stubs = [control_pb2_grpc.ControlServiceStub(channel) for channel in channels]
    request = control_pb2.GetStatusRequest()
    return [(await stub.GetStatus(request, timeout=30)).state.instance_id for stub in stubs]


async def test_streams_take_turns_at_the_processes_that_receive() -> None:
    """Each has a connection of its own: those of one would take turns."""
    async with (
        ingesting("daemon") as daemon,
        ingesting("one") as one,
        ingesting("two") as two,
        connected(f"127.0.0.1:{daemon}", (one, two)) as (connection, push_channels),
        AsyncExitStack() as stack,
    ):
        channels = await push_channels.open(3, stack)
        assert await asked(channels) == ["one", "two", "one"]
        assert len({id(each) for each in (*channels, connection.channel)}) == 4


@pytest.mark.parametrize("ports", [(), (1,)])
async def test_without_processes_that_can_be_reached_the_daemon_is_used(
    ports: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stream takes the connection that is there, the others have one each."""
    monkeypatch.setattr("genserve.transport.channels.CONNECT_TIMEOUT_S", 0.2)
    async with (
        ingesting("daemon") as daemon,
        connected(f"127.0.0.1:{daemon}", ports) as (connection, push_channels),
        AsyncExitStack() as stack,
    ):
        channels = await push_channels.open(3, stack)
        assert await asked(channels) == ["daemon"] * 3
        assert channels[0] is connection.channel
        assert len({id(each) for each in channels}) == 3


async def test_what_could_not_be_reached_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall would cost every stream, and every resume, its timeout."""
    monkeypatch.setattr("genserve.transport.channels.CONNECT_TIMEOUT_S", 0.2)
    port = free_port()
    async with (
        ingesting("daemon") as daemon,
        connected(f"127.0.0.1:{daemon}", (port,)) as (_, push_channels),
        AsyncExitStack() as stack,
    ):
        assert await asked(await push_channels.open(1, stack)) == ["daemon"]
        async with ingesting("late", f"127.0.0.1:{port}"):
            assert await asked(await push_channels.open(1, stack)) == ["daemon"]


@pytest.mark.parametrize("scheme", ["unix:", "unix-abstract:"])
async def test_a_socket_has_no_ports_beside_it(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the daemon says of its processes: none of them is waited for."""
    monkeypatch.setattr("genserve.transport.channels.CONNECT_TIMEOUT_S", 3600.0)
    async with (
        ingesting("other") as other,
        ingesting("daemon", f"{scheme}{tmp_path}/s"),
        connected(f"{scheme}{tmp_path}/s", (other,)) as (_, push_channels),
        AsyncExitStack() as stack,
        asyncio.timeout(STEP_S),
    ):
        assert await asked(await push_channels.open(2, stack)) == ["daemon"] * 2


class Serving(generation_pb2_grpc.GenerationServiceServicer, control_pb2_grpc.ControlServiceServicer):
    """A daemon or a front end, which says its name as text. `asked` counts its calls."""

    def __init__(self, name: str, ports: list[int]) -> None:
        self.name = name
        self.ports = ports
        self.asked: Counter[str] = Counter()
        self.is_full = False
        self.says_where = asyncio.Event()
        self.says_where.set()

    async def GetServerInfo(self, request: Any, context: Any) -> control_pb2.GetServerInfoResponse:
        self.asked["info"] += 1
        await self.says_where.wait()
        return control_pb2.GetServerInfoResponse(frontend_ports=self.ports)

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse(state=types_pb2.EngineState(instance_id=self.name))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.asked["generate"] += 1
        if self.is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if self.ports:
            await context.send_initial_metadata([(FRONTEND_PORTS_KEY, ",".join(map(str, self.ports)))])
        delta = generation_pb2.SequenceDelta(text=self.name)
        yield generation_pb2.GenerateResponse(outputs=[delta], usage=generation_pb2.Usage())

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateManyResponse]:
        async for request in requests:
            response = generation_pb2.GenerateResponse(
                outputs=[generation_pb2.SequenceDelta(text=self.name)], usage=generation_pb2.Usage()
            )
            item = generation_pb2.GenerateManyItem(request_id=request.generate.request_id, response=response)
            yield generation_pb2.GenerateManyResponse(items=[item])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes long to connect."""
    monkeypatch.setattr(channels, "CONNECT_TIMEOUT_S", 30.0)


@asynccontextmanager
async def serving(
    name: str, ports: list[int], address: str = "127.0.0.1:0", pair: Pair | None = None
) -> AsyncIterator[tuple[int, Serving]]:
    """A server of that name, with this certificate; its port."""
    servicer = Serving(name, ports)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address) if pair is None else server.add_secure_port(address, with_tls(pair))
    healthy = health.aio.HealthServicer()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await server.start()
    try:
        yield port, servicer
    finally:
        await server.stop(None)


def with_tls(pair: Pair) -> grpc.ServerCredentials:
    """Credentials of a server with this certificate."""
    return grpc.ssl_server_credentials([(Path(pair.key_file).read_bytes(), Path(pair.cert_file).read_bytes())])


@asynccontextmanager
async def served(num_frontends: int, further: tuple[int, ...] = ()) -> AsyncIterator[tuple[AsyncClient, Serving]]:
    """A client of a daemon with front ends, and with further ports where nobody listens."""
    async with AsyncExitStack() as stack:
        frontends = [await stack.enter_async_context(serving(f"front{i}", [])) for i in range(num_frontends)]
        ports = [port for port, _ in frontends]
        port, daemon = await stack.enter_async_context(serving("daemon", [*ports, *further]))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        yield client, daemon


async def names(client: AsyncClient, count: int) -> Counter[str]:
    """Who answers so many calls."""
    return Counter([(await client.generate([1])).text for _ in range(count)])


async def test_calls_are_spread_over_the_front_ends_once_they_are_found() -> None:
    """The daemon serves the first call, and says with it where they are: no other call is needed."""
    async with served(3) as (client, daemon):
        assert await names(client, 1) == {"daemon": 1}
        while "daemon" in await names(client, 1):
            await turns()
        assert await names(client, 12) == {"front0": 4, "front1": 4, "front2": 4}
        assert daemon.asked["info"] == 0


async def test_a_daemon_without_front_ends_is_looked_at_once() -> None:
    """And again after a while: it may have been started again."""
    with advanced_clock() as clock:
        async with served(0) as (client, daemon), serving("front", []) as (port, _):
            assert await names(client, 3) == {"daemon": 3}
            await turns()
            daemon.ports = [port]
            for _ in range(3):
                assert await names(client, 1) == {"daemon": 1}
                await turns()
            await clock.advance(channels.LOOK_AGAIN_S)
            while "daemon" in await names(client, 1):
                await turns()
            assert await names(client, 4) == {"front": 4}
            assert daemon.asked["info"] == 0


async def test_a_daemon_that_admits_no_call_has_said_nothing_of_front_ends() -> None:
    """They are found as soon as it admits one."""
    async with served(1) as (client, daemon):
        daemon.is_full = True
        with pytest.raises(MessageTooLargeError):  # as the code is without a reason
            await names(client, 1)
        await turns()
        daemon.is_full = False
        async with asyncio.timeout(STEP_S):
            while "daemon" in await names(client, 1):
                await turns()


async def test_a_stream_of_many_requests_stays_on_one_front_end() -> None:
    """Its responses carry what all of its requests gained in a step."""
    async with served(2) as (client, _):
        await client.wait_ready()
        async with client.stream_many() as many:
            for _ in range(5):
                await many.submit([1])
            await many.done()
            texts = [item.delta.text async for item in many if item.delta is not None]
        assert len(texts) == 5
        assert len(set(texts)) == 1
        assert set(texts) < {"front0", "front1"}


async def test_finding_them_again_ends_no_call() -> None:
    """The connections that there are already carry calls."""
    async with served(2) as (client, _):
        await client.wait_ready()
        async with client.stream_many() as many:
            await asyncio.gather(client.wait_ready(), client.wait_ready())
            await many.submit([1])
            await many.done()
            assert [item.error async for item in many] == [None]
        assert await names(client, 4) == {"front0": 2, "front1": 2}


async def found_in_vain(client: AsyncClient, clock: AdvancedClock) -> None:
    """Returns when the client has given up those front ends that it cannot connect to."""
    finding = asyncio.create_task(client.wait_ready())
    await clock.advance_until(finding.done, channels.CONNECT_TIMEOUT_S)
    await finding


async def test_ports_that_cannot_be_reached_are_not_used() -> None:
    """Behind a firewall or a tunnel: calls go to those that can be, or to the daemon."""
    with advanced_clock() as clock:
        async with served(1) as (client, daemon):
            await client.wait_ready()
            daemon.ports = [*daemon.ports, 1]
            await found_in_vain(client, clock)
            assert await names(client, 4) == {"front0": 4}
        async with served(0, further=(1, 2)) as (client, daemon):
            await found_in_vain(client, clock)
            assert await names(client, 4) == {"daemon": 4}
            assert daemon.asked["info"] == 1


async def test_waiting_for_a_daemon_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready. That it does not say where its front ends are is no reason to wait longer."""
    monkeypatch.setattr(channels, "ASK_TIMEOUT_S", 3600.0)
    with advanced_clock() as clock:
        async with served(1) as (client, daemon):
            daemon.says_where.clear()
            waiting = asyncio.create_task(client.wait_ready(600.0))
            while not daemon.asked["info"]:
                await turns()
            await clock.advance(600.0)
            await waiting
            daemon.says_where.set()


async def has_noticed(client: AsyncClient) -> None:
    """Returns when the client knows which of its connections have ended."""
    async with asyncio.timeout(STEP_S):
        while True:
            try:
                await names(client, 2)
            except UnavailableError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_lost_front_end_is_skipped_and_used_again_after_its_return() -> None:
    """Its port stays the same. Calls meanwhile go to the others, without an error."""
    async with AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(serving("front0", []))
        dying = AsyncExitStack()
        second = free_port()
        await dying.enter_async_context(serving("front1", [], f"127.0.0.1:{second}"))
        port, _ = await stack.enter_async_context(serving("daemon", [first, second]))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        await client.wait_ready()
        assert await names(client, 4) == {"front0": 2, "front1": 2}
        await dying.aclose()
        await has_noticed(client)
        assert await names(client, 4) == {"front0": 4}
        await stack.enter_async_context(serving("back", [], f"127.0.0.1:{second}"))
        async with asyncio.timeout(STEP_S):
            while "back" not in await names(client, 2):
                await asyncio.sleep(0.05)


async def test_a_front_end_is_connected_to_again_with_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a new authority: the channel of before could not connect. The other front end runs on, and so nobody asks
    the daemon."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    second = free_port()
    async with AsyncExitStack() as stack:
        dying = await stack.enter_async_context(AsyncExitStack())
        first, _ = await stack.enter_async_context(serving("front0", [], pair=pair))
        await dying.enter_async_context(serving("front1", [], f"127.0.0.1:{second}", pair))
        port, _ = await stack.enter_async_context(serving("daemon", [first, second], pair=pair))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}", ca_file=authority.ca_file))
        await client.wait_ready()
        assert await names(client, 4) == {"front0": 2, "front1": 2}
        await dying.aclose()
        Authority(tmp_path).replaces(authority, pair, "127.0.0.1")
        await has_noticed(client)
        await stack.enter_async_context(serving("back", [], f"127.0.0.1:{second}", pair))
        async with asyncio.timeout(STEP_S):
            while "back" not in await names(client, 2):
                await asyncio.sleep(0.05)


async def dies_when_called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A front end that is killed with a call: the kernel resets its connections."""
    writer.write(bytes.fromhex("000000040000000000"))  # a server's settings: now it is connected
    while b"GenerationService" not in (frame := await reader.read(1 << 16)):
        if frame == b"":
            return
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def generated_many(client: AsyncClient) -> None:
    await client.generate_many([[1]])


async def generated(client: AsyncClient) -> None:
    await client.generate([1])


@pytest.mark.parametrize("ask", [generated, generated_many])
async def test_a_front_end_that_dies_is_what_the_error_names(ask: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """The daemon goes on beside it, at another port: nothing is said of that."""
    server = await asyncio.start_server(dies_when_called, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, served(0, (port,)) as (client, daemon):
        await client.wait_ready()
        with refuses(UnavailableError, says=f"the connection to 127.0.0.1:{port} (a front end of ") as raised:
            await ask(client)
        assert "Stream removed" not in raised.value.message
        assert daemon.asked["generate"] == 0


async def test_a_daemon_that_was_started_again_has_other_front_ends() -> None:
    """Calls go to the daemon when all that are known are gone, and it says where the new ones are."""
    async with AsyncExitStack() as stack:
        dying = AsyncExitStack()
        gone, _ = await dying.enter_async_context(serving("gone", []))
        other, _ = await stack.enter_async_context(serving("other", []))
        port, daemon = await stack.enter_async_context(serving("daemon", [gone]))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        await client.wait_ready()
        assert await names(client, 1) == {"gone": 1}
        await dying.aclose()
        await has_noticed(client)
        daemon.ports = [other]
        async with asyncio.timeout(STEP_S):
            while (answered := await names(client, 1)) != {"other": 1}:
                assert answered == {"daemon": 1}
                await asyncio.sleep(0.01)
