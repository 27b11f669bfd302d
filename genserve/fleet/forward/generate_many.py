"""One call of GenerateMany: a stream of the client, and one call to each replica that runs some of its requests."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from genserve.client.transport.errors import error_of_status
from genserve.errors import (
    DeadlineError,
    GenserveError,
    NoReplicaError,
    ReplicaLostError,
    RequestIdInUseError,
    UnavailableError,
)
from genserve.fleet.fleet import Fleet
from genserve.fleet.forward.actions import Begun, Refusal, action_of
from genserve.fleet.forward.attempts import Attempts
from genserve.fleet.forward.forwarded import replica_lost
from genserve.fleet.forward.generate import remaining_s
from genserve.fleet.forward.leg import Leg, Running, has_only_columns
from genserve.fleet.forward.resume import Tokenize
from genserve.fleet.forward.routed import parsed
from genserve.fleet.forward.waiting import AbortedWhileWaitingError, Waiting
from genserve.fleet.loss import is_lost
from genserve.fleet.upstream import Upstream, frames_of
from genserve.rpc.status import to_message
from genserve.rpc.streams.generate_many import named_in
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

IDLE_S: Final = 2.0
"""After which a call that carries no request ends: a replica that shuts down waits for its calls."""
_HEAD_BYTES: Final = 2048
_ITEMS_PER_MESSAGE: Final = 256  # of errors, which have at most 4 KiB each

_Item = generation_pb2.GenerateManyItem


class GenerateMany:
    """One call. `run` it once.

    A message of a replica goes to the client as it came, unless it says of a request that it goes on elsewhere. While
    the client does not read, nothing is read from its replicas.
    """

    def __init__(
        self, fleet: Fleet, waiting: Waiting, tokenize: Tokenize, context: "ServicerContext[bytes, bytes]"
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._tokenize = tokenize
        self._context = context
        self._requests: dict[str, Running] = {}
        self._legs: dict[Upstream, Leg] = {}
        self._numbers: set[int] = set()  # of legs
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._writing = asyncio.Lock()
        self._num_writes = 0  # that are not done
        self._changed = asyncio.Event()

    async def run(self, frames: AsyncIterator[bytes]) -> None:
        """Returns when the client has closed its side and every request has ended. Ends them if it is cancelled."""
        await self._context.send_initial_metadata(())
        reading = self._spawn(self._read(frames))
        try:
            while not reading.done() or self._requests or self._num_writes:
                await self._changed.wait()
                self._changed.clear()
                if self._failure is not None:
                    raise self._failure
        finally:
            for leg in self._legs.values():
                _keep_open(leg)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for running in self._requests.values():
                running.attempts.end()

    # --- from the client

    async def _read(self, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            try:
                action: Begun | str | Refusal = await parsed(generation_pb2.GenerateManyRequest, frame, action_of)
            except GenserveError as error:
                action = named_in(frame[:_HEAD_BYTES]), error
            if isinstance(action, str):
                await self._abort(action, frame)
            elif isinstance(action, tuple):
                await self._refuse(*action)
            else:
                await self._begin(action, frame)

    async def _begin(self, begun: Begun, frame: bytes) -> None:
        forwarded = begun.forwarded
        request_id = forwarded.request_id
        if request_id in self._requests:
            await self._refuse(request_id, RequestIdInUseError(f"request {request_id!r} is already running"))
            return
        attempts = Attempts(self._fleet, forwarded.request, remaining_s(self._context))
        running = Running(forwarded, attempts, frame if begun.data is None else begun.data)
        self._requests[request_id] = running
        try:
            upstream = attempts.choose()
        except GenserveError as error:
            await self._finish(running, running.error(error))
            return
        if upstream is None:
            self._spawn(self._place(running))
        else:
            await self._send(running, upstream)

    async def _abort(self, request_id: str, frame: bytes) -> None:
        running = self._requests.get(request_id)
        if running is None:
            return
        running.is_aborted = True
        if running.leg is not None:
            await running.leg.write(frame)
        elif running.aborted is not None and not running.aborted.done():
            running.aborted.set_result(None)

    async def _refuse(self, request_id: str, error: GenserveError) -> None:
        await self._write_items([_Item(request_id=request_id, error=to_message(error))])

    # --- to a replica

    async def _place(self, running: Running, lost: ReplicaLostError | None = None) -> None:
        """Sends a request that has to wait for a replica, or has lost its own. `lost`: the error if no other comes."""
        running.aborted = asyncio.get_running_loop().create_future()
        if running.is_aborted:
            running.aborted.set_result(None)
        try:
            routing = running.attempts.next(has_begun=running.has_begun)
            upstream = await self._waiting.wait(running.request_id, routing, running.aborted)
        except AbortedWhileWaitingError:
            await self._finish(running, running.response(running.forwarded.aborted()))
        except GenserveError as error:
            no_other = lost is not None and isinstance(error, NoReplicaError)
            await self._finish(running, running.error(lost if lost is not None and no_other else error))
        else:
            await self._send(running, upstream)

    async def _resume(self, running: Running, upstream: Upstream, error: GenserveError) -> None:
        """Sends the rest of a request whose replica is lost."""
        resumption = running.resumption
        assert resumption is not None
        try:
            rest = await resumption.rest(self._tokenize)
        except GenserveError as second:
            await self._finish(running, running.error(replica_lost(upstream, resumption.num_tokens, error, second)))
            return
        message = generation_pb2.GenerateManyRequest(generate=rest, form=generation_pb2.GENERATE_MANY_FORM_ITEMS)
        running.data = message.SerializeToString()
        await self._place(running, replica_lost(upstream, resumption.num_tokens, error))

    async def _send(self, running: Running, upstream: Upstream) -> None:
        leg = self._legs.get(upstream)
        if leg is None:
            number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
            self._numbers.add(number)
            leg = self._legs[upstream] = Leg.open(upstream, number, remaining_s(self._context))
            self._spawn(self._read_leg(leg))
        _keep_open(leg)
        running.leg = leg
        running.num_here = 0
        leg.requests[running.request_id] = running
        if running.resumption is not None:
            running.resumption.admitted()
        await leg.write(running.data)

    # --- from a replica

    async def _read_leg(self, leg: Leg) -> None:
        upstream = leg.upstream
        error: GenserveError = UnavailableError(f"replica {upstream.address} has ended the stream")
        try:
            with upstream.running(leg.call):
                async for frame in frames_of(leg.call, upstream):
                    await self._pass_on(leg, frame)
        except GenserveError as raised:
            error = raised.with_traceback(None)
        finally:
            self._forget(leg)
        if isinstance(error, DeadlineError):
            raise error  # it was the client's
        items = [self._lost(running, leg, error) for running in tuple(leg.requests.values())]
        await self._write_items([item for item in items if item is not None])
        self._numbers.discard(leg.number)  # the client knows now that its slots are free

    async def _pass_on(self, leg: Leg, frame: bytes) -> None:
        if has_only_columns(frame):
            if frame:
                await self._write(frame)
            return
        response = generation_pb2.GenerateManyResponse.FromString(frame)
        is_changed = False
        gone: list[int] = []
        for index, item in enumerate(response.items):
            running = leg.requests.get(item.request_id)
            if running is None:
                gone.append(index)
            elif item.HasField("error"):
                ended = self._failed(running, leg, item)
                if ended is None:
                    gone.append(index)
                elif ended is not item:
                    item.CopyFrom(ended)
                    is_changed = True
            else:
                is_changed |= self._delivered(running, item)
        for index in reversed(gone):
            del response.items[index]
        if response.items or response.columns:
            await self._write(response.SerializeToString() if is_changed or gone else frame)

    def _delivered(self, running: Running, item: _Item) -> bool:
        """Notes an item with output, and returns whether it was changed."""
        running.num_here += 1
        running.has_begun = True
        running.data = b""
        is_changed = running.resumption is not None and running.resumption.take(item.response)
        if item.response.HasField("usage"):
            self._end(running)
        return is_changed

    def _failed(self, running: Running, leg: Leg, item: _Item) -> _Item | None:
        """What the client is told instead of an error, None if the request goes on elsewhere."""
        error = error_of_status(item.error, leg.upstream.address)
        if running.num_here and not is_lost(error):
            self._end(running)
            return item
        return self._lost(running, leg, error, item)

    def _lost(self, running: Running, leg: Leg, error: GenserveError, item: _Item | None = None) -> _Item | None:
        """A replica runs a request no more. Returns the end of the request, None if it goes on elsewhere. `item`: that
        told the error."""
        self._left(running)
        running.aborted = None
        upstream, resumption = leg.upstream, running.resumption
        try:
            if running.num_here == 0:
                running.attempts.failed(error, upstream)
            elif not is_lost(error):
                raise error
            elif resumption is None:
                raise replica_lost(upstream, None, error)
            elif (end := resumption.over()) is not None:
                self._end(running)
                return running.response(end)
            elif not running.is_aborted:
                running.attempts.begin_again(upstream, resumption.num_tokens - resumption.num_before)
                self._spawn(self._resume(running, upstream, error))
                return None
        except GenserveError as answer:
            self._end(running)
            return item if item is not None and answer is error else running.error(answer)
        self._spawn(self._place(running))
        return None

    # --- to the client

    def _end(self, running: Running) -> None:
        """A request has ended. Its id is free before the client hears of that."""
        running.attempts.end()
        if self._requests.get(running.request_id) is running:
            del self._requests[running.request_id]
        self._left(running)
        self._changed.set()

    def _left(self, running: Running) -> None:
        """No replica runs the request."""
        leg, running.leg = running.leg, None
        if leg is None:
            return
        leg.requests.pop(running.request_id, None)
        if not leg.requests and self._legs.get(leg.upstream) is leg:
            _keep_open(leg)
            leg.idle = asyncio.get_running_loop().call_later(IDLE_S, self._close, leg)

    def _close(self, leg: Leg) -> None:
        self._forget(leg)
        leg.call.cancel()

    def _forget(self, leg: Leg) -> None:
        _keep_open(leg)
        if self._legs.get(leg.upstream) is leg:
            del self._legs[leg.upstream]

    async def _finish(self, running: Running, item: _Item) -> None:
        self._end(running)
        await self._write_items([item])

    async def _write_items(self, items: Sequence[_Item]) -> None:
        for start in range(0, len(items), _ITEMS_PER_MESSAGE):
            part = items[start : start + _ITEMS_PER_MESSAGE]
            await self._write(generation_pb2.GenerateManyResponse(items=part).SerializeToString())

    async def _write(self, data: bytes) -> None:
        self._num_writes += 1
        try:
            async with self._writing:
                await self._context.write(data)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                self._fail(error)  # the client is gone: that says nothing of the replica
                await asyncio.Event().wait()
            raise
        finally:
            self._num_writes -= 1
            if not self._requests:
                self._changed.set()

    # --- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error.with_traceback(None)
        self._changed.set()


def _keep_open(leg: Leg) -> None:
    if leg.idle is not None:
        leg.idle.cancel()
        leg.idle = None
