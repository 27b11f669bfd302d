"""The side of the server of a call over the network in memory, as grpc.aio has it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from genserve.aio import Change
from genserve.rpc.handlers import behavior_of
from tests.simulation.network import Server

if TYPE_CHECKING:
    from tests.simulation.calls import Conversation

Metadata = tuple[tuple[str, Any], ...]


HOST_KEY = "host"
"""Of the caller, as only the simulation knows it."""


class Details(NamedTuple):
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


class Ended(NamedTuple):
    """How a call has ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


class Context:
    """grpc.aio.ServicerContext, and the task that serves a call."""

    def __init__(
        self, conversation: "Conversation", server: Server, timeout_s: float | None, metadata: Metadata
    ) -> None:
        self.server = server
        self.requests: deque[bytes | None] = deque()
        self.changed = Change()
        self._conversation = conversation
        self._metadata = metadata
        loop = asyncio.get_running_loop()
        self._until_s = None if timeout_s is None else loop.time() + timeout_s
        self._late = None if timeout_s is None else loop.call_later(timeout_s, conversation.server_broke)
        self._handler: Any = None
        self._has_begun = self._is_carried_out = self._was_told = False

    async def serve(self) -> None:
        """Serves the call to its end."""
        method, ended = self._conversation.method, Ended(grpc.StatusCode.OK)
        try:
            await self._serve(method)
        except _AbortedError as error:
            ended = error.ended
        except asyncio.CancelledError:
            ended = Ended(grpc.StatusCode.CANCELLED, "cancelled by the server")
        except Exception as error:
            self._conversation.network.faults.append(f"{method} raised {error!r}")
            ended = Ended(grpc.StatusCode.UNKNOWN, repr(error))
        finally:
            if self._late is not None:
                self._late.cancel()
            self._tell("ends")
        self._conversation.answer("ended", ended)

    async def _serve(self, method: str) -> None:
        table = self.server.table
        handler = self._handler = table.service(Details(method, self._metadata))
        self._is_carried_out = handler is table.service(Details(method, ()))  # and not one that refuses a router
        if handler is None:
            raise _AbortedError(Ended(grpc.StatusCode.UNIMPLEMENTED, f"no method {method}"))
        self._tell("is let through")
        behavior: Callable[..., Awaitable[Any]] = behavior_of(handler)
        requests = self._messages()
        request = requests if handler.request_streaming else await anext(requests)
        self._tell("begins")
        answer = await behavior(request, self)
        if not handler.response_streaming:
            await self.write(answer)

    def _tell(self, moment: str) -> None:
        self._was_told |= moment == "begins"
        is_told = self._was_told or moment == "is let through"
        if self.server.saw is not None and self._is_carried_out and is_told:
            caller = self._conversation.caller
            host = caller.host if caller is not None else ""
            self.server.saw(self._conversation.method, (*self._metadata, (HOST_KEY, host)), moment)

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            while not self.requests:
                await self.changed.wait()
            data = self.requests.popleft()
            if data is None:
                return
            parse = self._handler.request_deserializer
            yield data if parse is None else parse(data)

    # --- what grpc.aio offers

    async def write(self, message: Any) -> None:
        serialize = self._handler.response_serializer
        if not self._has_begun:
            self._tell("lets in")
        await self.send_initial_metadata(())
        self._conversation.answer("message", message if serialize is None else serialize(message))
        await asyncio.sleep(0)

    async def send_initial_metadata(self, metadata: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._conversation.answer("metadata", tuple(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _AbortedError(Ended(code, details, tuple(trailing_metadata)))

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else self._until_s - asyncio.get_running_loop().time()

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"


class _AbortedError(grpc.aio.AbortError):
    """Ends a call with a status."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.details)
        self.ended = ended
