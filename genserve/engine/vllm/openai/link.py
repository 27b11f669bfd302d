"""The sockets between the daemon and one process of an OpenAI server, where the daemon behaves as vLLM's engines do."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio
from vllm.utils.network_utils import ZmqListener, get_open_zmq_ipc_path, make_zmq_listener, make_zmq_socket

_MAX_UNREAD: Final = 4096
"""Messages, one for each step of an engine, that wait until the server reads them. More are not kept."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Where a server process joins: listeners that it inherits, of a ROUTER and a PULL socket."""

    requests: ZmqListener
    outputs: ZmqListener

    @classmethod
    def new(cls) -> "ServerPlace":
        """One that nobody knows yet."""
        requests = make_zmq_listener(get_open_zmq_ipc_path(), zmq.ROUTER)
        try:
            return cls(requests, make_zmq_listener(get_open_zmq_ipc_path(), zmq.PULL))
        except BaseException:
            requests.cleanup()
            raise

    def close(self) -> None:
        """Closes the listeners of this process and removes their files."""
        self.requests.cleanup()
        self.outputs.cleanup()


class ServerLink:
    """Connected to a new place. `ready`: by engine, what it says of itself; `take` gets what the server sends to an
    engine; `fail` is called with the reason when the server does not behave."""

    def __init__(
        self,
        context: zmq.Context[Any],
        ready: Mapping[bytes, bytes],
        take: Callable[[bytes, Sequence[Any]], None],
        fail: Callable[[str], None],
    ) -> None:
        self.place = ServerPlace.new()
        """Where the server joins."""
        self._take = take
        self._fail = fail
        self._sockets: list[Any] = []
        self._reading: list[asyncio.Task[None]] = []
        try:
            self._connect(context, ready)
        except BaseException:
            self.close()
            raise

    def _connect(self, context: zmq.Context[Any], ready: Mapping[bytes, bytes]) -> None:
        self._to_server = context.socket(zmq.PUSH)
        self._sockets.append(self._to_server)
        self._to_server.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
        self._to_server.connect(self.place.outputs.address)
        asynchronous = zmq.asyncio.Context(context)
        for engine, said in ready.items():
            from_server = make_zmq_socket(
                asynchronous, self.place.requests.address, zmq.DEALER, identity=engine, bind=False
            )
            self._sockets.append(from_server)
            zmq.Socket.shadow(from_server).send(said)  # the only message in this direction
            self._reading.append(asyncio.create_task(self._read(engine, from_server), name="openai-requests"))

    def send(self, frames: Sequence[Any]) -> None:
        """One message to the server."""
        try:
            self._to_server.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._fail(f"it has not read {_MAX_UNREAD} messages")

    def close(self) -> None:
        """Closes the sockets and the place. What was not sent is lost."""
        for each in self._reading:
            each.cancel()
        for each in self._sockets:
            each.close(linger=0)
        self.place.close()

    async def _read(self, engine: bytes, from_server: Any) -> None:
        while True:
            frames = await from_server.recv_multipart(copy=False)
            try:
                self._take(engine, frames)
            except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
                self._fail(f"it has sent what no client of vLLM's sends: {error}")
                return
            await asyncio.sleep(0)  # to receive what is there already lets nobody else have a turn
