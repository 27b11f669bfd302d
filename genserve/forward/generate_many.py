"""One call of GenerateMany: a stream of the caller, and one call to each replica that runs some of its requests."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from genserve.aio import cancel_all, is_cancelled
from genserve.errors import DeadlineError, GenserveError, RequestIdInUseError, UnavailableError
from genserve.forward.attempts import Attempts
from genserve.forward.caller import (
    Abort,
    AbortedWhileWaitingError,
    Action,
    Begun,
    Caller,
    Failure,
    Loss,
    Waiting,
    replica_lost,
)
from genserve.forward.destinations import Destinations, UpstreamT
from genserve.forward.leg import Leg, Legs, Running, has_only_columns
from genserve.forward.resume import Resumption, Tokenize
from genserve.forward.upstream import frames_of, is_lost, told
from genserve.transport.errors import error_of_status
from genserve.v1 import generation_pb2

_MAX_UNWRITTEN: Final = 256  # messages that wait for the caller to read them: with so many, none of its own are read
T = TypeVar("T")
_Item = generation_pb2.GenerateManyItem
_End: TypeAlias = _Item | Failure


class GenerateMany(Generic[UpstreamT]):
    """One call. `run` it once.

    A message of a replica goes to the caller as it came, unless it says of a request that it goes on elsewhere. While
    the caller does not read, nothing is read from its replicas. A replica that takes nothing holds up its own requests.
    """

    def __init__(self, fleet: Destinations[UpstreamT], waiting: Waiting, tokenize: Tokenize, caller: Caller) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._tokenize = tokenize
        self._caller = caller
        self._requests: dict[str, Running[UpstreamT]] = {}
        self._legs: Legs[UpstreamT] = Legs()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._writing = asyncio.Lock()
        self._num_writes = 0  # that are not done
        self._changed = asyncio.Event()

    async def run(self, actions: AsyncIterator[Action]) -> None:
        """Returns when there are no more actions and every request has ended. Ends them if it is cancelled."""
        await self._caller.admitted()
        reading = self._spawn(self._read(actions))
        try:
            while not reading.done() or self._requests or self._num_writes:
                await self._changed.wait()
                self._changed.clear()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._legs.keep_all()
            await cancel_all(list(self._tasks))
            for running in self._requests.values():
                running.attempts.end()

    # --- from the caller

    async def _read(self, actions: AsyncIterator[Action]) -> None:
        async for action in actions:
            match action:
                case Begun():
                    await self._begin(action)
                case Abort():
                    await self.abort(action)
                case Failure():
                    await self._tell([action])
            if self._num_writes >= _MAX_UNWRITTEN:
                async with self._writing:  # the lock is fair: all earlier writes are over then
                    pass

    async def _begin(self, begun: Begun) -> None:
        forwarded = begun.forwarded
        request_id = forwarded.request_id
        if request_id in self._requests:
            await self._tell([Failure(request_id, RequestIdInUseError.of(request_id))])
            return
        attempts = Attempts(self._fleet, forwarded.request, self._caller.remaining_s())
        running = Running(forwarded, attempts, begun.data)
        self._requests[request_id] = running
        try:
            while (upstream := attempts.choose(full := self._legs.full)) is None and full:
                await self._wait(running, self._legs.room.next.wait())
            if upstream is None:
                self._spawn(self._place(running))
            else:
                self._send(running, upstream)
        except Exception as error:
            await self._finish(running, _end_of(running, error))

    async def abort(self, abort: Abort) -> None:
        """Ends a request, if it is one of this call and runs."""
        running = self._requests.get(abort.request_id)
        if running is None or running.is_aborted:
            return
        running.is_aborted = True
        if running.leg is not None:
            running.leg.send(abort.message())
        elif running.aborted is not None and not running.aborted.done():
            running.aborted.set_result(None)

    # --- to a replica

    async def _place(self, running: Running[UpstreamT]) -> None:
        """Sends a request that has to wait for a replica, or has lost its own."""
        try:
            self._send(running, await self._wait(running, running.attempts.next()))
        except Exception as error:
            await self._finish(running, _end_of(running, error))

    async def _wait(self, running: Running[UpstreamT], work: Coroutine[Any, Any, T]) -> T:
        """The result of what has to be done before a replica has the request: an abort finds it here."""
        running.aborted = asyncio.get_running_loop().create_future()
        if running.is_aborted:
            running.aborted.set_result(None)
        return await self._waiting.wait(running.request_id, work, running.aborted)

    async def _resume(self, running: Running[UpstreamT], resumption: Resumption) -> None:
        """Sends the rest of a request whose replica is lost."""
        try:
            rest = await self._wait(running, resumption.rest(self._tokenize))
        except Exception as error:
            await self._finish(running, _end_of(running, error))
            return
        message = generation_pb2.GenerateManyRequest(generate=rest, form=generation_pb2.GENERATE_MANY_FORM_ITEMS)
        running.data = message.SerializeToString()
        await self._place(running)

    def _send(self, running: Running[UpstreamT], upstream: UpstreamT) -> None:
        leg = self._legs.to(upstream)
        if leg is None:
            leg = self._legs.open(upstream, self._caller.remaining_s())
            leg.sending = self._spawn(leg.send_all(self._legs.room.notify))
            self._spawn(self._read_leg(leg))
        running.leg = leg
        running.num_here = 0
        if running.resumption is not None:
            running.resumption.admitted()
        leg.begin(running)

    # --- from a replica

    async def _read_leg(self, leg: Leg[UpstreamT]) -> None:
        upstream = leg.upstream
        error: GenserveError = UnavailableError(f"replica {upstream.address} has ended the stream")
        try:
            with upstream.running(leg.call):
                async for frame in frames_of(leg.call, upstream):
                    await self._pass_on(leg, frame)
        except Exception as raised:
            error = told(raised).with_traceback(None)
        finally:
            self._legs.forget(leg)
        if isinstance(error, DeadlineError):
            raise error  # the deadline was the caller's
        ends = [self._lost(running, leg, error) for running in tuple(leg.requests.values())]
        await self._tell([end for end in ends if end is not None])
        self._legs.free(leg)  # the caller knows now that its slots are free

    async def _pass_on(self, leg: Leg[UpstreamT], frame: bytes) -> None:
        if has_only_columns(frame):
            if frame:
                leg.count_columns(frame)
                await self._write(frame)
            return
        response = generation_pb2.GenerateManyResponse.FromString(frame)
        leg.count(response)
        is_changed = False
        gone: list[int] = []
        ends: list[_End] = []
        for index, item in enumerate(response.items):
            running = leg.requests.get(item.request_id)
            if running is None:
                gone.append(index)
                continue
            try:
                if item.HasField("error"):
                    end = self._failed(running, leg, item)
                else:
                    is_changed |= self._delivered(running, item)
                    end = item
            except Exception as error:  # it ends this request, and the replica is not to go on with it
                leg.send(Abort(running.request_id).message())
                self._end(running)
                end = running.failed(error)
            if end is not item:
                gone.append(index)
                ends += [] if end is None else [end]
        for index in reversed(gone):
            del response.items[index]
        if response.items or response.columns:
            await self._write(response.SerializeToString() if is_changed or gone else frame)
        await self._tell(ends)

    def _delivered(self, running: Running[UpstreamT], item: _Item) -> bool:
        """Notes an item with output, and returns whether it was changed."""
        running.num_here += 1
        running.data = b""
        is_changed = running.resumption is not None and running.resumption.take(item.response)
        if item.response.HasField("usage"):
            self._end(running)
        return is_changed

    def _failed(self, running: Running[UpstreamT], leg: Leg[UpstreamT], item: _Item) -> _End | None:
        """The item for the caller instead of an error, None if the request goes on elsewhere."""
        error = error_of_status(item.error, leg.upstream.address)
        if running.num_here and not is_lost(error):
            self._end(running)
            return item
        return self._lost(running, leg, error, item)

    def _lost(
        self, running: Running[UpstreamT], leg: Leg[UpstreamT], error: GenserveError, item: _Item | None = None
    ) -> _End | None:
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
                raise replica_lost(upstream, leg.num_tokens(running), error)
            elif (end := resumption.over()) is not None:
                self._end(running)
                return running.response(end)
            elif not running.is_aborted:
                running.loss, running.num_here = Loss(upstream, resumption.num_tokens, error), 0
                num_tokens = resumption.num_tokens - resumption.num_before
                running.attempts.begin_again(error, upstream, num_tokens, resumption.last_version)
                self._spawn(self._resume(running, resumption))
                return None
        except GenserveError as answer:
            self._end(running)
            return item if running.loss is None and answer is error and item is not None else running.failed(answer)
        self._spawn(self._place(running))
        return None

    # --- to the caller

    def _end(self, running: Running[UpstreamT]) -> None:
        """A request has ended. Its id is free before the caller hears of that."""
        running.attempts.end()
        if self._requests.get(running.request_id) is running:
            del self._requests[running.request_id]
        self._left(running)
        self._changed.set()

    def _left(self, running: Running[UpstreamT]) -> None:
        """No replica runs the request."""
        leg, running.leg = running.leg, None
        if leg is None:
            return
        leg.requests.pop(running.request_id, None)
        self._legs.left(leg)

    async def _finish(self, running: Running[UpstreamT], end: _End) -> None:
        self._end(running)
        await self._tell([end])

    async def _tell(self, ends: Sequence[_End]) -> None:
        """Requests have ended, and no replica says so."""
        if items := [end for end in ends if isinstance(end, _Item)]:
            await self._write(generation_pb2.GenerateManyResponse(items=items).SerializeToString())
        if failures := [end for end in ends if isinstance(end, Failure)]:
            await self._writes(self._caller.fail(failures))

    async def _write(self, data: bytes) -> None:
        await self._writes(self._caller.write(data))

    async def _writes(self, write: Coroutine[Any, Any, None]) -> None:
        self._num_writes += 1
        try:
            async with self._writing:
                await write
        except (Exception, asyncio.CancelledError) as error:
            if not is_cancelled():
                self._fail(error)  # the caller is gone: that says nothing of the replica
                await asyncio.Event().wait()
            raise
        finally:
            write.close()  # if it never began
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


def _end_of(running: Running[UpstreamT], error: Exception) -> _End:
    """How a request ends that no replica gets."""
    if isinstance(error, AbortedWhileWaitingError):
        return running.response(running.forwarded.aborted())
    return running.failed(error)
