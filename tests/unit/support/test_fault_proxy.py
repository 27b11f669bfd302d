"""The proxy that makes links fail: each fault does what it says, to the connections that it is for."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import pytest

from tests.support.fault_proxy import Connection, FaultProxy, Way
from tests.support.patience import until

Link: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect: TypeAlias = "Callable[[], Awaitable[Link]]"


class Capitals:
    """A server that returns what it gets, in capitals."""

    def __init__(self) -> None:
        self.arrived = bytearray()
        self.ended = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while data := await reader.read(1 << 20):
                self.arrived.extend(data)
                writer.write(data.upper())
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended.set()
            writer.close()


@pytest.fixture
def server() -> Capitals:
    return Capitals()


@pytest.fixture
async def proxy(server: Capitals) -> AsyncIterator[FaultProxy]:
    """In front of the server."""
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    async with FaultProxy(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}") as proxy, asyncio.timeout(30):
        yield proxy
    listening.close()


@pytest.fixture
async def connect(proxy: FaultProxy) -> AsyncIterator[Connect]:
    """Opens connections through the proxy."""
    writers = []

    async def one() -> Link:
        host, port = proxy.address.rsplit(":", 1)
        link = await asyncio.open_connection(host, int(port))
        writers.append(link[1])
        return link

    yield one
    for writer in writers:
        writer.close()


async def is_silent(reader: asyncio.StreamReader, wait_s: float = 0.2) -> bool:
    """Whether nothing comes for a while, not even the end."""
    try:
        async with asyncio.timeout(wait_s):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def test_cut_at_a_byte_reports_each_connection(server: Capitals) -> None:
    """Of those that arrive, before the next ones do."""
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    counted = 0

    def accepted(connection: Connection) -> None:
        def arrived(num_bytes: int) -> None:
            nonlocal counted
            counted += num_bytes
            if counted >= 50_000:
                connection.reset()

        connection.flows[Way.TO_SERVER].on_arrival = arrived

    target = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with FaultProxy(target, accepted) as proxy, asyncio.timeout(30):
        host, port = proxy.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"x" * 1_000_000)
        with pytest.raises(ConnectionError):
            await reader.read()  # to the end
        await server.ended.wait()
    assert 50_000 <= counted < 50_000 + (16 << 10)
    assert len(server.arrived) <= counted
    writer.close()
    listening.close()


async def test_without_a_fault_everything_passes_and_ends(proxy: FaultProxy, connect: Connect) -> None:
    """Bytes, and the end of a side."""
    reader, writer = await connect()
    writer.write(b"x" * 1_000_000)
    writer.write_eof()
    assert await reader.read() == b"X" * 1_000_000


async def test_a_black_hole_holds_everything_until_it_heals(proxy: FaultProxy, connect: Connect) -> None:
    """Also the end of a connection, and connections that begin meanwhile."""
    reader, writer = await connect()
    writer.write(b"a")
    assert await reader.readexactly(1) == b"A"
    proxy.black_hole()
    writer.write(b"b")
    later = await connect()
    later[1].write(b"c")
    assert await is_silent(reader) and await is_silent(later[0])
    proxy.heal()
    assert await reader.readexactly(1) == b"B"
    assert await later[0].readexactly(1) == b"C"


async def test_a_client_that_ends_in_a_black_hole_is_there_for_the_server(
    proxy: FaultProxy, server: Capitals, connect: Connect
) -> None:
    """As when its host loses its power."""
    reader, writer = await connect()
    writer.write(b"a")
    await reader.readexactly(1)
    proxy.black_hole()
    writer.transport.abort()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.ended.wait(), 0.2)
    proxy.heal()
    await server.ended.wait()


@pytest.mark.parametrize("way", Way)
async def test_one_direction_can_be_lost_alone(proxy: FaultProxy, server: Capitals, connect: Connect, way: Way) -> None:
    """The server gets what is sent, if it is its answers that are lost."""
    reader, writer = await connect()
    proxy.black_hole(way)
    writer.write(b"a")
    await until(lambda: server.arrived or way is Way.TO_SERVER)
    assert await is_silent(reader)
    assert bytes(server.arrived) == (b"" if way is Way.TO_SERVER else b"a")
    proxy.heal()
    assert await reader.readexactly(1) == b"A"


async def test_a_delay_is_that_of_the_link_and_not_of_each_piece(proxy: FaultProxy, connect: Connect) -> None:
    """Pieces that follow each other are all as late as the first."""
    reader, writer = await connect()
    proxy.switch(Way.TO_SERVER, delay_s=0.3)
    began_s = time.monotonic()
    for _ in range(60):
        writer.write(b"y" * (16 << 10))
        await writer.drain()
    await reader.readexactly(1)
    assert time.monotonic() - began_s >= 0.3
    await reader.readexactly(60 * (16 << 10) - 1)
    assert time.monotonic() - began_s < 60 * 0.3


async def test_a_throttled_link_lets_so_many_bytes_pass(proxy: FaultProxy, connect: Connect) -> None:
    """And all of them in the end."""
    reader, writer = await connect()
    proxy.switch(Way.TO_CLIENT, bytes_per_s=200_000)
    began_s = time.monotonic()
    writer.write(b"z" * 100_000)
    assert await reader.readexactly(100_000) == b"Z" * 100_000
    assert time.monotonic() - began_s > 0.4  # the last piece need not wait for itself


async def test_a_reset_is_told_to_both_sides_even_in_a_black_hole(
    proxy: FaultProxy, server: Capitals, connect: Connect
) -> None:
    """New connections are taken."""
    reader, writer = await connect()
    writer.write(b"a")
    await reader.readexactly(1)
    proxy.black_hole()
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    await server.ended.wait()
    proxy.heal()
    reader, writer = await connect()
    writer.write(b"b")
    assert await reader.readexactly(1) == b"B"


async def test_a_fault_can_be_that_of_one_connection(proxy: FaultProxy, connect: Connect) -> None:
    """The others do not notice."""
    links = []
    for _ in range(2):
        links.append(await connect())
        links[-1][1].write(b"a")
        await links[-1][0].readexactly(1)
    first, second = proxy.connections
    first.switch(is_lost=True)
    for _, writer in links:
        writer.write(b"b")
    assert await links[1][0].readexactly(1) == b"B"
    assert await is_silent(links[0][0])
    assert (first.flows[Way.TO_SERVER].num_bytes, second.flows[Way.TO_SERVER].num_bytes) == (1, 2)


async def test_a_proxy_that_refuses_can_listen_again(proxy: FaultProxy, connect: Connect) -> None:
    """At the same address; what is open stays."""
    reader, writer = await connect()
    writer.write(b"a")
    await reader.readexactly(1)
    proxy.refuse()
    with pytest.raises(OSError, match="Connect call failed"):
        await connect()
    writer.write(b"b")
    assert await reader.readexactly(1) == b"B"
    await proxy.listen()
    again = await connect()
    again[1].write(b"c")
    assert await again[0].readexactly(1) == b"C"


@pytest.mark.parametrize("end", [FaultProxy.reset, FaultProxy.refuse])
async def test_a_connection_that_is_still_being_made_ends_as_well(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, end: Callable[[FaultProxy], None]
) -> None:
    """Otherwise somebody is reached after his link was cut for good."""
    is_asked, goes_on = asyncio.Event(), asyncio.Event()
    open_connection = asyncio.open_connection

    async def slow(host: str, port: int) -> Link:
        is_asked.set()
        await goes_on.wait()
        return await open_connection(host, port)

    monkeypatch.setattr(asyncio, "open_connection", slow)
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.setblocking(False)
        await is_asked.wait()
        end(proxy)
        goes_on.set()
        with pytest.raises(ConnectionError):
            await asyncio.get_running_loop().sock_recv(client, 1)
