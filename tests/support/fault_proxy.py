"""A TCP proxy whose links fail as networks do: bytes that are lost one way or both, that come late or slowly, resets.

A fault is switched on and off while connections run, for all of them or for one. TCP sends again what a network loses,
so what is lost here is held back, and arrives when the link has healed. The end of a connection is lost like its bytes.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any, Self

from genserve.aio import Change
from tests.support.ports import free_port

_PIECE_BYTES = 16 << 10
_MAX_PIECES = 64
"""Held in each direction of a connection. The kernel holds some more, and then the sender cannot write."""
_LINGER_NOT = struct.pack("ii", 1, 0)
"""Closing with this sends a reset instead of an orderly end."""


class Way(Enum):
    """A direction."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


BOTH = tuple(Way)


@dataclass(frozen=True, slots=True)
class Faults:
    """Of one direction. `is_lost`: nothing arrives. `delay_s`: everything arrives so much later. `bytes_per_s`: no more
    than that arrives; None = no limit."""

    is_lost: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None


class Flow:
    """What goes one way over one connection. `num_bytes` have arrived so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
        self._reader = reader
        self._writer = writer
        self._faults = faults
        self._changed = Change()
        self._pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PIECES)
        self._free_s = 0.0
        self.num_bytes = 0
        self.on_arrival: Callable[[int], None] = lambda _: None
        """Told how many bytes have just arrived."""

    def switch(self, **faults: Any) -> None:
        """Changes these fields of its faults, at once."""
        self._faults = replace(self._faults, **faults)
        self._changed.notify()

    async def run(self) -> None:
        """Until the end has arrived, or either side is reset."""
        receiving = asyncio.create_task(self._receive())
        try:
            await self._deliver()
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])

    async def _receive(self) -> None:
        data = b"x"
        while data:
            try:
                data = await self._reader.read(_PIECE_BYTES)
            except OSError:  # a reset is an end as well
                data = b""
            await self._pieces.put((time.monotonic(), data))

    async def _deliver(self) -> None:
        while True:
            sent_s, data = await self._pieces.get()
            await self._until_due(sent_s, len(data))
            if not data:
                break
            self._writer.write(data)
            self.num_bytes += len(data)
            self.on_arrival(len(data))
            await self._writer.drain()
        with suppress(OSError):
            self._writer.write_eof()

    async def _until_due(self, sent_s: float, num_bytes: int) -> None:
        while True:
            faults, now_s = self._faults, time.monotonic()
            wait_s = None if faults.is_lost else max(sent_s + faults.delay_s, self._free_s) - now_s
            if wait_s is not None and wait_s <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        self._free_s = 0.0 if faults.bytes_per_s is None else time.monotonic() + num_bytes / faults.bytes_per_s


class Connection:
    """A client's, and the one to the server that belongs to it."""

    def __init__(self, writers: Iterable[asyncio.StreamWriter], flows: dict[Way, Flow]) -> None:
        self._writers = tuple(writers)
        self._is_reset = asyncio.Event()
        self.flows = flows

    def switch(self, *ways: Way, **faults: Any) -> None:
        """Changes these fields of `Faults`, for these directions or both."""
        for way in ways or BOTH:
            self.flows[way].switch(**faults)

    def reset(self) -> None:
        """Ends it at once, as both sides notice, even if the link is black-holed."""
        self._is_reset.set()
        for writer in self._writers:
            reset(writer)

    async def run(self) -> None:
        """Until it has ended on both sides, or was reset on one."""
        flowing = [asyncio.create_task(flow.run()) for flow in self.flows.values()]
        both = asyncio.gather(*flowing)
        ends: list[asyncio.Future[Any]] = [both, asyncio.ensure_future(self._is_reset.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*flowing, *ends, return_exceptions=True)
            self.reset()


class FaultProxy:
    """Forwards connections to `target` ("host:port"), which may change. `address` is where it listens. `accepted` is
    called with each connection before anything flows."""

    def __init__(self, target: str, accepted: Callable[[Connection], None] = lambda _: None) -> None:
        self._accepted = accepted
        self.target = target
        self._faults = dict.fromkeys(BOTH, Faults())
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_resets = 0
        self.connections: list[Connection] = []
        """Those that are open, the oldest first."""
        self.address = f"127.0.0.1:{free_port()}"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.refuse()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self) -> None:
        """Takes connections; always at the same address."""
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))

    def refuse(self) -> None:
        """Takes no more connections; those that are open stay."""
        if self._server is not None:
            self._server.close()

    def switch(self, *ways: Way, **faults: Any) -> None:
        """Changes these fields of `Faults`, for these directions or both, of all connections and of those to come."""
        for way in ways or BOTH:
            self._faults[way] = replace(self._faults[way], **faults)
        for connection in self.connections:
            connection.switch(*ways, **faults)

    def black_hole(self, *ways: Way) -> None:
        """Nothing arrives any more in these directions, or in both, and nobody is told."""
        self.switch(*ways, is_lost=True)

    def heal(self) -> None:
        """Every link is whole, and what was held arrives."""
        self.switch(is_lost=False, delay_s=0.0, bytes_per_s=None)

    def reset(self) -> None:
        """Ends every connection at once. New ones are taken."""
        self._num_resets += 1
        for connection in self.connections:
            connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        num_resets = self._num_resets
        try:
            host, _, port = self.target.rpartition(":")
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
            if num_resets != self._num_resets or self._server is None or not self._server.is_serving():
                reset(server_writer)  # what ended all others came meanwhile
                reset(writer)
                return
            flows = {
                Way.TO_SERVER: Flow(reader, server_writer, self._faults[Way.TO_SERVER]),
                Way.TO_CLIENT: Flow(server_reader, writer, self._faults[Way.TO_CLIENT]),
            }
            connection = Connection((writer, server_writer), flows)
            self.connections.append(connection)
            self._accepted(connection)
            try:
                await connection.run()
            finally:
                self.connections.remove(connection)
        except OSError:  # nobody listens there
            reset(writer)
        finally:
            self._tasks.discard(task)


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset, of which the other side is told at once."""
    with suppress(OSError, ValueError):  # as asyncio and uvloop say that it is closed
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()
