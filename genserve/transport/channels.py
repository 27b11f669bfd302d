"""The connections of a client beside its first one: to the daemon's front ends, and for the streams of a push."""

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
import grpc.aio

from genserve.errors import GenserveError
from genserve.net import is_socket
from genserve.transport.connection import Connection
from genserve.transport.errors import ClientClosedError
from genserve.v1 import control_pb2, generation_pb2, generation_pb2_grpc
from genserve.wire.literals import FRONTEND_PORTS_KEY

if TYPE_CHECKING:
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub

# Smaller pushes do not ask the daemon for further ports: they would be over by then.
PUSH_MIN_BYTES: Final = 64 << 20
CONNECT_TIMEOUT_S: Final = 2.0
ASK_TIMEOUT_S: Final = 5.0
LOOK_AGAIN_S: Final = 60.0
"""Time after which a daemon without front ends may have been started again with some."""


class PushChannels:
    """Gives each stream a connection: to one of the daemon's receiving processes if it can be reached, else to the
    daemon itself. `ports` are those of the processes, on the daemon's host."""

    def __init__(self, connection: Connection, ports: Sequence[int] = ()) -> None:
        self._connection = connection
        host, colon, _ = connection.target.rpartition(":")
        is_tcp = bool(colon) and not is_socket(connection.target)
        self._targets = [f"{host}:{port}" for port in ports] if is_tcp else []

    async def open(self, count: int, stack: AsyncExitStack) -> list[grpc.aio.Channel]:
        """A connection for each of `count` streams, closed by `stack`. Streams on one connection would take turns and
        share one window."""
        channels = []
        for index in range(count):
            channel = await self._ingest(index, stack)
            if channel is None and index == 0:
                channel = self._connection.channel  # it is open already
            elif channel is None:
                channel = await stack.enter_async_context(self._connection.another_channel())
            channels.append(channel)
        return channels

    async def _ingest(self, index: int, stack: AsyncExitStack) -> grpc.aio.Channel | None:
        if not self._targets:
            return None
        target = self._targets[index % len(self._targets)]
        channel = await stack.enter_async_context(self._connection.another_channel(target))
        try:
            with self._connection.typed_errors():
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
        except TimeoutError:
            # If one is behind a firewall or another address, all are, and none is tried again.
            self._targets = []
            return None
        return channel


class _Frontend(NamedTuple):
    """A connection to a front end, and the certificates that it was made with."""

    channel: grpc.aio.Channel
    stub: "GenerationServiceAsyncStub"
    certificate_number: int


class FrontendChannels:
    """Spreads calls over the front ends. The daemon names their ports in the initial metadata of the calls that it
    serves itself, so finding them costs no call and delays none: until then, and where none can be reached, calls go to
    the daemon."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        host, colon, _ = connection.target.rpartition(":")
        self._host = host if colon and not is_socket(connection.target) else ""
        self._frontends: dict[int, _Frontend] = {}
        self._connecting = asyncio.Lock()
        self._turn = 0
        self._looking: asyncio.Task[None] | None = None
        self.looks_at_s = 0.0
        """The time of the loop before which it does not look for the ports."""
        connection.on_close(self._give_up)

    def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> tuple[Any, str]:
        """Begins a call of Generate. Returns it with what is called, for people."""
        stub, target = self._stub()
        call = stub.Generate(request, timeout=timeout_s, metadata=self._connection.metadata)
        self._look_at(call, stub)
        return call, target

    def generate_many(self, timeout_s: float | None) -> tuple[Any, str]:
        """Begins a call of GenerateMany. Returns it with what is called, for people."""
        stub, target = self._stub()
        call = stub.GenerateMany(timeout=timeout_s, metadata=self._connection.metadata)
        self._look_at(call, stub)
        return call, target

    def abort_waiting(self, request_ids: Sequence[str] | None) -> list[str]:
        """None wait here: a daemon has them at once."""
        return []

    async def find(self) -> None:
        """Returns when the front ends are found and connected, as far as they can be. For who begins with one long
        call."""
        if self._host == "":
            return
        try:
            info = await self._connection.unary(
                self._connection.control.GetServerInfo, control_pb2.GetServerInfoRequest(), ASK_TIMEOUT_S
            )
        except GenserveError:
            return  # a daemon that has none serves all the same
        await self.connect(info.frontend_ports)

    async def connect(self, ports: Sequence[int]) -> None:
        """Uses the front ends on these ports, and no others. A connection that there is already is kept, with the calls
        that it carries."""
        if not ports:
            self.looks_at_s = asyncio.get_running_loop().time() + LOOK_AGAIN_S
        async with self._connecting:
            for port in self._frontends.keys() - set(ports):
                await self._frontends.pop(port).channel.close()
            missing = [port for port in ports if port not in self._frontends]
            connected = await asyncio.gather(*map(self._connected, missing))
            self._frontends |= {port: each for port, each in zip(missing, connected, strict=True) if each is not None}

    def _stub(self) -> "tuple[GenerationServiceAsyncStub, str]":
        """The stub for the next call, and what it calls: of the front ends that are connected, in turns, or of the
        daemon."""
        daemon, target = self._connection.generation, self._connection.target
        frontends = list(self._frontends.items())
        for _ in frontends:
            self._turn += 1
            port, known = frontends[self._turn % len(frontends)]
            # A front end that is being started again is connected to in the background.
            if known.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
                return known.stub, f"{self._host}:{port} (a front end of {target})"
            if known.certificate_number != self._connection.certificate_number:
                self._frontends[port] = self._opened(port)
        return daemon, target

    def _look_at(self, call: Any, stub: "GenerationServiceAsyncStub") -> None:
        """Looks for the ports in what the daemon says first, if this call goes to the daemon."""
        loop = asyncio.get_running_loop()
        if self._host == "" or stub is not self._connection.generation or loop.time() < self.looks_at_s:
            return
        if self._looking is None or self._looking.done():
            # Neither a dropped client nor a dropped stream may be kept alive by this.
            self._looking = loop.create_task(_look(weakref.ref(self), call), name="finding front ends")

    def _opened(self, port: int) -> "_Frontend":
        number = self._connection.certificate_number
        channel = self._connection.another_channel(f"{self._host}:{port}")
        return _Frontend(channel, generation_pb2_grpc.GenerationServiceStub(channel), number)

    async def _connected(self, port: int) -> "_Frontend | None":
        try:
            frontend = self._opened(port)
            with self._connection.typed_errors():
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await frontend.channel.channel_ready()
        except ClientClosedError:
            return None
        except TimeoutError:
            await frontend.channel.close()  # behind a firewall or a tunnel
            return None
        return frontend

    def _give_up(self) -> None:
        if self._looking is not None:
            self._looking.cancel()


async def _look(channels: "weakref.ref[FrontendChannels]", call: Any) -> None:
    # A cancelled task keeps its error, that this frame, and that the connection.
    with contextlib.suppress(asyncio.CancelledError):  # of this task, or of the call
        metadata = await call.initial_metadata()
        named = next((value for key, value in metadata or () if key == FRONTEND_PORTS_KEY), None)
        if named is None and call.done() and await call.code() is not grpc.StatusCode.OK:
            return  # it was not admitted, and nothing was said
        if (found := channels()) is not None:
            await found.connect([int(port) for port in named.split(",")] if named else [])
