"""Calls of gRPC over the network in memory: what is on its way, and the side of the client, as grpc.aio has it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from genserve.aio import Change
from tests.simulation.network import Network, Pipe
from tests.simulation.served_call import Context, Ended, Metadata
from tests.simulation.virtual_time import PROCESS, Process


class Conversation:
    """Both sides of one call, and what is on its way between them."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        call: "MemoryCall",
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        self.network = network
        self.method = method
        self.caller: Process | None = PROCESS.get()
        self._call = call
        self._address = address
        self._link = network.link(self.caller.host if self.caller is not None else "", address)
        self._up = Pipe(self._link, self._at_server)
        self._down = Pipe(self._link, self._at_client)
        self._served: Context | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_over = False
        self._link.conversations[self] = None
        self._loses = ""
        drawn = network.drawn
        if drawn.random() < network.weather.lost:
            self._loses = drawn.choice(("request", "answer", "late", "all", "straggles"))
            if self._loses in ("late", "all"):  # it breaks at some time, or at one end alone
                asyncio.get_running_loop().call_later(drawn.random() * 2, self.breaks, drawn.random() * 3)
        if self._loses == "straggles":  # it arrives, and by then its sender may be gone
            self._up.hold_up(drawn.random() * 15)
        if self._loses == "request":
            self.breaks(0.0)
        else:
            self._up.send(("call", timeout_s, metadata))

    # --- the client's side

    def send(self, message: tuple[Any, ...]) -> None:
        """To the server."""
        if self.caller is None or self.caller.is_alive:
            self._up.send(message)

    def _at_client(self, message: tuple[Any, ...]) -> None:
        kind, content = message
        if kind == "ended":
            if self._loses == "answer":
                content = Ended(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
            self._call.ended(content)
            self._forget()
        elif kind == "metadata":
            self._call.began(content)
        elif self._loses != "answer":
            self._call.arrived(content)

    def client_broke(self, why: str) -> None:
        """The client hears no more of it."""
        self._call.ended(Ended(grpc.StatusCode.UNAVAILABLE, why))

    # --- the server's side

    def _at_server(self, message: tuple[Any, ...]) -> None:
        if self._is_over:
            return  # the connection has broken meanwhile
        match message:
            case ("call", timeout_s, metadata):
                server = self.network.server_at(self._address)
                if server is None:
                    self._down.send(("ended", Ended(grpc.StatusCode.UNAVAILABLE, "Connection refused")))
                    return
                self._served = Context(self, server, timeout_s, metadata)
                self._serving = server.process.start(self._served.serve(), self.method)
            case ("message", data) if self._served is not None:
                self._served.requests.append(data)
                self._served.changed.notify()
            case ("half",) if self._served is not None:
                self._served.requests.append(None)
                self._served.changed.notify()
            case ("cancel",):
                self.server_broke()

    def answer(self, kind: str, content: Any) -> None:
        """To the client."""
        if self._served is not None and self._served.server.process.is_alive and not self._is_over:
            self._down.send((kind, content))

    def server_broke(self) -> None:
        """The server hears no more of it: who serves it is cancelled."""
        if self._serving is not None:
            self._serving.cancel()
        self._forget()

    # --- the way

    def breaks(self, server_notices_s: float) -> None:
        """The connection does: the client knows at once, the server a while later."""
        if not self._is_over:
            loop = asyncio.get_running_loop()
            loop.call_later(self.network.delay_s(), self.client_broke, "Connection reset by peer")
            loop.call_later(server_notices_s, self.server_broke)

    def process_killed(self, process: Process) -> None:
        """One of both sides is gone, unless the other one cannot know."""
        later = asyncio.get_running_loop().call_later
        if self._served is not None and self._served.server.process is process:
            later(20.0 if self._link.is_cut else self.network.delay_s(), self.client_broke, "Socket closed")
            self._forget()
        elif self.caller is process and self._loses == "straggles":
            self._up.send(("cancel",))
        elif self.caller is process:
            later(30.0 if self._link.is_cut else self.network.delay_s(), self.server_broke)

    def _forget(self) -> None:
        self._is_over = True
        self._link.conversations.pop(self, None)


class MemoryCall:
    """What grpc.aio gives a client for a call. `is_unary`: one answer comes."""

    def __init__(self, parse: Callable[[bytes], Any] | None, *, is_unary: bool) -> None:
        self._parse = parse
        self._is_unary = is_unary
        self._changed = Change()
        self._messages: deque[Any] = deque()
        self._metadata: Metadata | None = None
        self._ended: Ended | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self.conversation: Conversation | None = None

    def begin(
        self,
        network: Network,
        address: str,
        method: str,
        timeout_s: float | None,
        metadata: Metadata,
        requests: Sequence[bytes] | AsyncIterator[Any],
    ) -> None:
        """Sends it."""
        self.conversation = conversation = Conversation(network, address, method, self, timeout_s, metadata)
        if timeout_s is not None:
            late = Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, late)
        if isinstance(requests, Sequence):
            for each in requests:
                conversation.send(("message", each))
            conversation.send(("half",))
        else:
            self._sending = asyncio.get_running_loop().create_task(self._send(requests, conversation))

    async def _send(self, requests: AsyncIterator[Any], conversation: Conversation) -> None:
        async for each in requests:
            if self._ended is not None:
                return
            conversation.send(("message", each))
        conversation.send(("half",))

    # --- what comes

    def began(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._changed.notify()

    def arrived(self, data: bytes) -> None:
        if self._ended is None:
            self._messages.append(data)
            self._changed.notify()

    def ended(self, how: Ended) -> None:
        if self._ended is not None:
            return
        self._ended = how
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self._changed.notify()
        for callback in self._callbacks:
            callback(self)

    def _give_up(self, how: Ended) -> None:
        if self._ended is None and self.conversation is not None:
            self.ended(how)
            self.conversation.send(("cancel",))

    # --- what grpc.aio offers

    def cancel(self) -> bool:
        was_done = self._ended is not None
        self._give_up(Ended(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return not was_done

    def done(self) -> bool:
        return self._ended is not None

    def cancelled(self) -> bool:
        return self._ended is not None and self._ended.code is grpc.StatusCode.CANCELLED

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._ended is None:
            self._callbacks.append(callback)
        else:
            callback(self)

    async def _over(self) -> Ended:
        while self._ended is None:
            await self._changed.wait()
        return self._ended

    async def code(self) -> grpc.StatusCode:
        return (await self._over()).code

    async def details(self) -> str:
        return (await self._over()).details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._over()).trailing)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        while self._metadata is None and self._ended is None:
            await self._changed.wait()
        return grpc.aio.Metadata(*(self._metadata or ()))

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            await self._over()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_failure()
        return self._parsed(self._messages[0])

    async def read(self) -> Any:
        """The next message, or EOF."""
        try:
            while not self._messages and self._ended is None:
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._messages and not self.cancelled():
            return self._parsed(self._messages.popleft())
        self._raise_failure()
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def _parsed(self, data: bytes) -> Any:
        return data if self._parse is None else self._parse(data)

    def _raise_failure(self) -> None:
        if self.cancelled() and self._is_locally_cancelled:
            raise asyncio.CancelledError
        if self._ended is not None and self._ended.code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                self._ended.code,
                grpc.aio.Metadata(*(self._metadata or ())),
                grpc.aio.Metadata(*self._ended.trailing),
                details=self._ended.details,
            )

    @property
    def _is_locally_cancelled(self) -> bool:
        return self._ended is not None and self._ended.details.startswith("Locally")
