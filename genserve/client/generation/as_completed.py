"""Many prompts over one stream; each answer is returned as soon as it is complete."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final

from genserve.client.generation.many import ManyItem, ManyStream, StreamOverError
from genserve.client.generation.results import Generation
from genserve.errors import GenserveError, QueueFullError
from genserve.transport.streams import AsyncClosing
from genserve.v1 import generation_pb2

# Half of the default limit of a daemon for all its clients, and more than an engine runs at once.
MAX_IN_FLIGHT: Final = 4096
_RETRY_AFTER_S: Final = 0.5  # if the daemon gives no delay


class CompletedStream(AsyncClosing, AsyncIterator[tuple[int, Generation]]):
    """Yields (position among the prompts, generation) as each one ends; a failed one has an `error`.

    At most MAX_IN_FLIGHT requests run at once. If the daemon refuses a request because its queue is full, the request
    is sent again when the queue has room, until the deadline of the stream. Running requests are ended by `aclose()`,
    by leaving `async with`, and when the stream is dropped. A wait for an item may be cancelled.
    """

    def __init__(self, many: ManyStream, messages: Sequence[generation_pb2.GenerateRequest]) -> None:
        """`messages` are sent over `many`, which nobody else uses. They get ids here."""
        for message in messages:
            message.request_id = many.next_id()
        self._many = many
        self._unfinished = {message.request_id: (index, Generation()) for index, message in enumerate(messages)}
        self._submissions = _Submissions(many, messages)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._submitting = asyncio.create_task(self._submissions.run())
        self._closed = False

    async def __anext__(self) -> tuple[int, Generation]:
        """The next complete generation. Raises the error that ended the stream."""
        try:
            while True:
                completed = self._add(await anext(self._many))
                if completed is not None:
                    return completed
        except (GenserveError, StopAsyncIteration) as end:
            if not self._unfinished:  # every answer is here, so that only the end of the call can be lost
                raise StopAsyncIteration from end
            # An error of sending says more than the end of the stream.
            if not self._closed and self._submitting.done() and not self._submitting.cancelled():
                self._submitting.result()
            if not self._closed and self._unfinished and isinstance(end, StopAsyncIteration):
                num_running = len(self._unfinished)
                raise GenserveError(f"the daemon ended the stream while {num_running} requests were running") from end
            raise

    def _add(self, item: ManyItem) -> tuple[int, Generation] | None:
        if item.request_id not in self._unfinished:  # an error without the id of a request
            raise item.error or GenserveError(f"the daemon answered for {item.request_id!r}, which is not running")
        position, generation = self._unfinished[item.request_id]
        if isinstance(item.error, QueueFullError) and generation.prompt is None:  # it has not begun
            self._submissions.refused(item.request_id, item.error.retry_after_s)
            return None
        if item.delta is not None:
            generation.add(item.delta)
        if not item.is_last:
            return None
        del self._unfinished[item.request_id]
        self._submissions.ended(item.request_id)
        generation.error = item.error
        return position, generation

    def cancel(self) -> None:
        """`aclose` for callbacks."""
        self._closed = True
        self._submitting.cancel()
        self._many.cancel()

    def __del__(self) -> None:
        # See MessageReader: the task would keep the stream alive.
        if self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._submitting.cancel)


class _Submissions:
    """Sends requests, but no more at once than the daemon accepts.

    After a refusal, the limit of running requests is the number that were not refused: one that ends makes room for
    one. Because others may have made room too, the limit doubles after each delay without a refusal.
    """

    def __init__(self, many: ManyStream, messages: Sequence[generation_pb2.GenerateRequest]) -> None:
        self._many = many
        self._waiting = deque(messages)
        self._in_flight: dict[str, generation_pb2.GenerateRequest] = {}
        self._limit = MAX_IN_FLIGHT
        self._holds = False
        self._relaxes_at = 0.0
        self._delay_s = _RETRY_AFTER_S
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when all requests have ended. A request that cannot be sent ends the stream, because its reader would
        wait for ever."""
        try:
            while self._waiting or self._in_flight:
                self._changed.clear()  # first: requests may end while another one is being sent
                while self._waiting and not self._holds and len(self._in_flight) < self._limit:
                    message = self._waiting.popleft()
                    self._in_flight[message.request_id] = message
                    await self._many.put(message)
                await self._change()
            await self._many.done()
        except StreamOverError:
            return  # the reader of the stream gets this error too
        except BaseException:
            self._many.cancel()
            raise

    def refused(self, request_id: str, retry_after_s: float | None) -> None:
        """Records that the daemon's queue was full. The request is sent first when there is room."""
        self._waiting.appendleft(self._in_flight.pop(request_id))
        self._limit = max(len(self._in_flight), 1)
        self._delay_s = _RETRY_AFTER_S if retry_after_s is None else retry_after_s
        self._relaxes_at = self._clock() + self._delay_s
        self._holds = True
        self._changed.set()

    def ended(self, request_id: str) -> None:
        """Records that a request has ended, which makes room for another one."""
        del self._in_flight[request_id]
        self._holds = False
        self._changed.set()

    async def _change(self) -> None:
        """Returns when a request has ended or was refused, or the limit has doubled."""
        is_limited = bool(self._waiting) and self._limit < MAX_IN_FLIGHT
        try:
            async with asyncio.timeout_at(self._relaxes_at if is_limited else None):
                await self._changed.wait()
        except TimeoutError:
            self._limit = min(2 * self._limit, MAX_IN_FLIGHT)
            self._relaxes_at = self._clock() + self._delay_s
            self._holds = False
