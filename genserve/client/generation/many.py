"""Many requests over one stream."""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

import grpc.aio

from genserve.client.generation.columns import Sequences
from genserve.client.generation.options import GenerateOptions, PromptLike, generate_request
from genserve.client.generation.results import Delta
from genserve.errors import GenserveError
from genserve.forward.caller import Failure
from genserve.transport.errors import error_of, error_of_status
from genserve.transport.streams import EOF, AsyncClosing, FinalStatus, MessageReader
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from genserve.transport.connection import Connection


_COLUMNS: Final = generation_pb2.GENERATE_MANY_FORM_COLUMNS  # a daemon that does not know it answers with items


class StreamOverError(RuntimeError):
    """The stream takes no more requests: `done` was called, or the daemon has ended it without an error."""


@dataclass(slots=True)
class ManyItem:
    """What one request gained (`delta`; the one with a usage is its last), or its end by an error (`error`)."""

    request_id: str
    delta: Delta | None
    error: GenserveError | None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows for this request."""
        return self.delta is None or self.delta.is_last


class ManyStream(AsyncClosing, AsyncIterator[ManyItem]):
    """One GenerateMany call. Iterate while you submit, or submit everything first: both sides are independent.

    An error of a request is an item; iterating raises only what ends the whole stream. The call is cancelled, which
    ends its requests in the daemon, by `aclose()`, by leaving `async with`, and when the stream is dropped. Waiting for
    an item, or for `submit`, may be given up: the stream goes on.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, Any]",
        target: str,
        connection: "Connection",
        abort: Callable[[Sequence[str]], Awaitable[object]],
    ) -> None:
        """`target`: what is called, for people. `abort` ends requests by another call: this one cannot say it after
        `done`."""
        self._call = call
        self._abort = abort
        self._target = target
        self._connection = connection
        self._status = FinalStatus(call)
        self._messages = MessageReader(call, partial(connection.typed_errors, target), self._status)
        self._items: deque[ManyItem] = deque()
        self._sequences = Sequences()
        self._prefix = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._writing = asyncio.Lock()
        self._is_done = False
        self.num_messages = 0
        """Messages of the daemon so far; each has the items of one step of the engine."""

    async def submit(self, prompt: PromptLike, **options: Unpack[GenerateOptions]) -> str:
        """Begins a request, with the options of `AsyncClient.stream`; returns its id, minted when none is given.

        Raises ValueError for an id that is running in this stream, InvalidFieldError for an option, and what ended the
        stream if it is over. A request is sent even if waiting for it is given up.
        """
        message = generate_request(prompt, options)
        message.request_id = message.request_id or self.next_id()
        await self.put(message)
        return message.request_id

    async def put(self, message: generation_pb2.GenerateRequest) -> None:
        """`submit` for a request that has been built, and has an id."""
        if message.request_id in self._running:
            raise ValueError(f"a request {message.request_id!r} is already running in this stream")
        self._running.add(message.request_id)
        await self._send(generation_pb2.GenerateManyRequest(generate=message, form=_COLUMNS))

    def next_id(self) -> str:
        """An id for a request that no other has."""
        return f"{self._prefix}-{next(self._numbers)}"

    async def abort(self, request_id: str) -> None:
        """Ends a request; it finishes as `aborted` and keeps its tokens. Does nothing if it has ended meanwhile."""
        if request_id not in self._running:
            return
        if self._is_done:
            await self._abort([request_id])
        else:
            await self._send(generation_pb2.GenerateManyRequest(abort=request_id))

    async def done(self) -> None:
        """Tells that nothing more will be submitted: the stream ends with the last request."""
        self._is_done = True
        await self._send(None)

    async def __anext__(self) -> ManyItem:
        """The next item. Raises a `GenserveError` if the stream failed, ClientClosedError if the client is closed."""
        while not self._items:
            response = await self._messages.next()
            if response is EOF:
                raise StopAsyncIteration
            if isinstance(response, Failure):
                self._sequences.forget(response.request_id)
                self._items.append(ManyItem(response.request_id, None, response.error))
            else:
                self.num_messages += 1
                self._add(response)
        item = self._items.popleft()
        if item.is_last:
            self._running.discard(item.request_id)
        return item

    def _add(self, response: generation_pb2.GenerateManyResponse) -> None:
        for columns in response.columns:
            for request_id, delta in self._sequences.deltas(columns):
                self._items.append(ManyItem(request_id, delta, None))
        for message in response.items:
            if message.HasField("error"):
                error = error_of_status(message.error, self._target)
                self._items.append(ManyItem(message.request_id, None, error))
            else:
                self._items.append(ManyItem(message.request_id, Delta(message.response), None))
            self._sequences.note(message)

    def cancel(self) -> None:
        """`aclose` for callbacks."""
        self._items.clear()
        self._messages.cancel()

    async def _send(self, message: generation_pb2.GenerateManyRequest | None) -> None:
        # gRPC ends the call when a write is cancelled, so the write does not belong to whoever waits for it.
        await asyncio.shield(
            asyncio.create_task(
                _write(self._call, message, self._writing, self._status, self._connection, self._target)
            )
        )


async def _write(
    call: "grpc.aio.StreamStreamCall[Any, Any]",
    message: generation_pb2.GenerateManyRequest | None,
    writing: asyncio.Lock,
    status: FinalStatus,
    connection: "Connection",
    target: str,
) -> None:
    """Writes a message, or the end. No method, for a stream that is dropped while this waits must not be kept alive."""
    try:
        async with writing:
            with connection.typed_errors(target):
                await status.of(call.done_writing() if message is None else call.write(message))
    except (asyncio.InvalidStateError, grpc.aio.InternalError) as error:
        # It is over, which gRPC says in either way, or `done` was called.
        connection.check_open()
        if isinstance(error, grpc.aio.InternalError):
            await status.wait()
        if status.failure is None:
            raise StreamOverError("the stream accepts no more requests") from error
        raise error_of(status.failure, target) from error
