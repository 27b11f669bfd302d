"""Which connection each stream of a push goes over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from genserve.transport.connection import Connection
from genserve.transport.push_channels import PushChannels
from genserve.v1 import control_pb2, control_pb2_grpc, types_pb2
from tests.support.patience import STEP_S
from tests.support.ports import free_port


class Named(control_pb2_grpc.ControlServiceServicer):
    """Says who it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse(state=types_pb2.EngineState(instance_id=self.name))


@asynccontextmanager
async def serving(name: str, address: str = "127.0.0.1:0") -> AsyncIterator[int]:
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
        serving("daemon") as daemon,
        serving("one") as one,
        serving("two") as two,
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
    monkeypatch.setattr("genserve.transport.push_channels.CONNECT_TIMEOUT_S", 0.2)
    async with (
        serving("daemon") as daemon,
        connected(f"127.0.0.1:{daemon}", ports) as (connection, push_channels),
        AsyncExitStack() as stack,
    ):
        channels = await push_channels.open(3, stack)
        assert await asked(channels) == ["daemon"] * 3
        assert channels[0] is connection.channel
        assert len({id(each) for each in channels}) == 3


async def test_what_could_not_be_reached_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall would cost every stream, and every resume, its timeout."""
    monkeypatch.setattr("genserve.transport.push_channels.CONNECT_TIMEOUT_S", 0.2)
    port = free_port()
    async with (
        serving("daemon") as daemon,
        connected(f"127.0.0.1:{daemon}", (port,)) as (_, push_channels),
        AsyncExitStack() as stack,
    ):
        assert await asked(await push_channels.open(1, stack)) == ["daemon"]
        async with serving("late", f"127.0.0.1:{port}"):
            assert await asked(await push_channels.open(1, stack)) == ["daemon"]


@pytest.mark.parametrize("scheme", ["unix:", "unix-abstract:"])
async def test_a_socket_has_no_ports_beside_it(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the daemon says of its processes: none of them is waited for."""
    monkeypatch.setattr("genserve.transport.push_channels.CONNECT_TIMEOUT_S", 3600.0)
    async with (
        serving("other") as other,
        serving("daemon", f"{scheme}{tmp_path}/s"),
        connected(f"{scheme}{tmp_path}/s", (other,)) as (_, push_channels),
        AsyncExitStack() as stack,
        asyncio.timeout(STEP_S),
    ):
        assert await asked(await push_channels.open(2, stack)) == ["daemon"] * 2
