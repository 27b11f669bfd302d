"""Many requests over one stream."""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from genserve.client.errors import error_of, error_of_status
from genserve.client.final_status import FinalStatus
from genserve.client.requests import GenerateOptions, PromptLike, generate_request
from genserve.client.results import Delta
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2


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


class ManyStream(AsyncIterator[ManyItem]):
    """One GenerateMany call. Iterate while you submit, or submit everything first: both sides are independent.

    An error of a request is an item; iterating raises only what ends the whole stream. The call is cancelled, which
    ends its requests in the daemon, by `aclose()` and by leaving `async with`.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, Any]",
        target: str,
        abort: Callable[[Sequence[str]], Awaitable[object]],
    ) -> None:
        """`abort` ends requests by another call: this one cannot say it after `done`."""
        self._call = call
        self._abort = abort
        self._target = target
        self._status = FinalStatus(call)
        self._items: deque[generation_pb2.GenerateManyItem] = deque()
        self._prefix = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._writing = asyncio.Lock()
        self._is_done = False
        self._closed = False
        self.num_messages = 0
        """Messages of the daemon so far; each has the items of one step of the engine."""

    async def submit(self, prompt: PromptLike, **options: Unpack[GenerateOptions]) -> str:
        """Begins a request, with the options of `AsyncClient.stream`; returns its id, minted when none is given.

        Raises ValueError for an id that is running in this stream, and what ended the stream if it is over.
        """
        request_id = options.get("request_id") or self.next_id()
        if request_id in self._running:
            raise ValueError(f"a request {request_id!r} is running in this stream")
        message = generation_pb2.GenerateManyRequest(generate=generate_request(prompt, options))
        message.generate.request_id = request_id
        self._running.add(request_id)
        await self._send(message)
        return request_id

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
        async with self._writing:
            await self._call.done_writing()

    async def __anext__(self) -> ManyItem:
        """The next item. Raises a `GenserveError` if the stream failed."""
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            try:
                response: Any = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise error_of(self._status.cause_of(error), self._target) from error
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
            self.num_messages += 1
            self._items.extend(response.items)
        message = self._items.popleft()
        if message.HasField("error"):
            item = ManyItem(message.request_id, None, error_of_status(message.error, self._target))
        else:
            item = ManyItem(message.request_id, Delta(message.response), None)
        if item.is_last:
            self._running.discard(item.request_id)
        return item

    async def aclose(self) -> None:
        """Cancels the call unless it is over."""
        self.cancel()

    def cancel(self) -> None:
        """`aclose` for callbacks."""
        self._closed = True
        self._items.clear()
        self._call.cancel()

    async def _send(self, message: generation_pb2.GenerateManyRequest) -> None:
        try:
            async with self._writing:
                await self._call.write(message)
        except asyncio.InvalidStateError as error:
            # It is over, or `done` was called.
            if self._status.failure is None:
                raise RuntimeError("the stream takes no more requests") from error
            raise error_of(self._status.failure, self._target) from error
        except grpc.aio.AioRpcError as error:
            raise error_of(self._status.cause_of(error), self._target) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
