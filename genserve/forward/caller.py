"""The caller who asks for tokens: another process, for a router; the program itself, for a client that calls replicas.
What its messages ask for, which of its requests wait for a replica, and where the answer goes."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from genserve.errors import GenserveError, InvalidFieldError, QueueFullError
from genserve.forward.forwarded import Forwarded
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

T = TypeVar("T")
MAX_WAITING: Final = 1 << 14
"""Requests that wait in one process. Their messages are kept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one request of a stream by an error."""

    request_id: str
    error: GenserveError


class Caller(Protocol):
    """Gets the answer of one call. A write waits while the caller does not read."""

    def remaining_s(self) -> float | None:
        """The time until the call's deadline, None = it has none."""

    async def admitted(self) -> None:
        """The call has been admitted: by a replica, or as a stream."""

    async def write(self, data: bytes) -> None:
        """Passes on a message of the answer."""

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Tells of requests of a stream that have failed."""

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """The error that is raised next is the answer of this call of a replica."""


class AbortedWhileWaitingError(Exception):
    """Somebody has ended the request before a replica had it."""


class Waiting:
    """The requests that wait for a replica, of all calls of one sender: bounds how many, and ends them by their ids."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._count = 0
        self._aborts: dict[str, set[asyncio.Future[None]]] = {}

    async def wait(
        self,
        request_id: str,
        routing: Coroutine[Any, Any, T],
        aborted: "asyncio.Future[None] | None" = None,
    ) -> T:
        """The result of `routing`. Raises QueueFullError if too many wait, AbortedWhileWaitingError after `abort` or
        when `aborted` is done."""
        if self._count >= self._limit:
            routing.close()
            raise QueueFullError(f"{self._count} requests wait for a replica, the most that may", retry_after_s=1.0)
        if aborted is None:
            aborted = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(routing)
        self._count += 1
        self._aborts.setdefault(request_id, set()).add(aborted)
        try:
            either: set[asyncio.Future[Any]] = {task, aborted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                raise AbortedWhileWaitingError
            return task.result()
        finally:
            task.cancel()
            aborted.cancel()
            self._count -= 1
            self._aborts[request_id].discard(aborted)
            if not self._aborts[request_id]:
                del self._aborts[request_id]

    def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all. Returns the ids of those that waited."""
        found = [each for each in (self._aborts if request_ids is None else request_ids) if each in self._aborts]
        for request_id in found:
            for aborted in self._aborts[request_id]:
                if not aborted.done():
                    aborted.set_result(None)
        return found


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is to end, if it runs."""

    request_id: str

    def message(self) -> bytes:
        """For a replica that runs it."""
        return generation_pb2.GenerateManyRequest(abort=self.request_id).SerializeToString()


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that has arrived. `data`: the message to send for it."""

    forwarded: Forwarded
    data: bytes


Action: TypeAlias = Begun | Abort | Failure


def action_of(message: generation_pb2.GenerateManyRequest, data: bytes | None = None) -> Action:
    """What a message of a GenerateMany call asks for. `data`: the message as it came, None = it is to be serialized."""
    kind = message.WhichOneof("action")
    if kind == "abort":
        return Abort(message.abort)
    if kind is None:
        return Failure("", InvalidFieldError.of("action", "is required: generate or abort"))
    try:
        forwarded = Forwarded(message.generate)
    except GenserveError as error:
        return Failure(message.generate.request_id[:MAX_TEXT_CHARS], error)
    in_columns = message.form == generation_pb2.GENERATE_MANY_FORM_COLUMNS
    if forwarded.resumption is not None and in_columns:
        # Its tokens have to be read here. A client that knows columns knows items as well.
        message.form = generation_pb2.GENERATE_MANY_FORM_ITEMS
    elif not forwarded.was_minted and data is not None:
        return Begun(forwarded, data)
    return Begun(forwarded, message.SerializeToString())
