"""One call of GenerateMany: a stream of the caller, and one call to each replica that runs some of its requests."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from genserve.cancellation import is_cancelled
from genserve.client.forward.actions import Abort, Action, Begun
from genserve.client.forward.attempts import Attempts
from genserve.client.forward.caller import Caller, Failure
from genserve.client.forward.destinations import Destinations, UpstreamT
from genserve.client.forward.forwarded import replica_lost
from genserve.client.forward.leg import Leg, Running, has_only_columns
from genserve.client.forward.loss import is_lost, told
from genserve.client.forward.resume import Tokenize
from genserve.client.forward.upstream import frames_of
from genserve.client.forward.waiting import AbortedWhileWaitingError, Waiting
from genserve.client.transport.errors import error_of_status
from genserve.errors import (
    DeadlineError,
    GenserveError,
    NoReplicaError,
    ReplicaLostError,
    RequestIdInUseError,
    UnavailableError,
)
from genserve.v1 import generation_pb2

IDLE_S: Final = 2.0  # after which a call without requests ends: a replica that shuts down waits for its calls
_MAX_UNWRITTEN: Final = 256  # messages that wait for the caller to read them: with so many, none of its own are read
T = TypeVar("T")
_Item = generation_pb2.GenerateManyItem
_End: TypeAlias = _Item | Failure


class GenerateMany(Generic[UpstreamT]):
    """One call. `run` it once.

    A message of a replica goes to the caller as it came, unless it says of a request that it goes on elsewhere. While
    the caller does not read, nothing is read from its replicas.
    """

    def __init__(self, fleet: Destinations[UpstreamT], waiting: Waiting, tokenize: Tokenize, caller: Caller) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._tokenize = tokenize
        self._caller = caller
        self._requests: dict[str, Running[UpstreamT]] = {}
        self._legs: dict[UpstreamT, Leg[UpstreamT]] = {}
        self._numbers: set[int] = set()  # of legs
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
            for leg in self._legs.values():
                _keep_open(leg)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
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
            if (upstream := attempts.choose()) is None:
                self._spawn(self._place(running))
            else:
                await self._send(running, upstream)
        except Exception as error:
            await self._finish(running, running.failed(error))

    async def abort(self, abort: Abort) -> None:
        """Ends a request, if it is one of this call and runs."""
        running = self._requests.get(abort.request_id)
        if running is None:
            return
        running.is_aborted = True
        if running.leg is not None:
            await running.leg.write(abort.message())
        elif running.aborted is not None and not running.aborted.done():
            running.aborted.set_result(None)

    # --- to a replica

    async def _place(self, running: Running[UpstreamT], lost: ReplicaLostError | None = None) -> None:
        """Sends a request that has to wait for a replica, or has lost its own. `lost`: the error if no other comes."""
        try:
            await self._send(running, await self._wait(running, running.attempts.next(has_begun=running.has_begun)))
        except AbortedWhileWaitingError:
            await self._finish(running, running.response(running.forwarded.aborted()))
        except Exception as error:
            no_other = lost is not None and isinstance(error, NoReplicaError)
            await self._finish(running, running.failed(lost if lost is not None and no_other else error))

    async def _wait(self, running: Running[UpstreamT], work: Coroutine[Any, Any, T]) -> T:
        """The result of what has to be done before a replica has the request: an abort finds it here."""
        running.aborted = asyncio.get_running_loop().create_future()
        if running.is_aborted:
            running.aborted.set_result(None)
        return await self._waiting.wait(running.request_id, work, running.aborted)

    async def _resume(self, running: Running[UpstreamT], upstream: UpstreamT, error: GenserveError) -> None:
        """Sends the rest of a request whose replica is lost."""
        resumption = running.resumption
        assert resumption is not None
        try:
            rest = await self._wait(running, resumption.rest(self._tokenize))
        except AbortedWhileWaitingError:
            await self._finish(running, running.response(running.forwarded.aborted()))
            return
        except Exception as second:
            lost = replica_lost(upstream, resumption.num_tokens, error, told(second))
            await self._finish(running, running.failed(lost))
            return
        message = generation_pb2.GenerateManyRequest(generate=rest, form=generation_pb2.GENERATE_MANY_FORM_ITEMS)
        running.data = message.SerializeToString()
        await self._place(running, replica_lost(upstream, resumption.num_tokens, error))

    async def _send(self, running: Running[UpstreamT], upstream: UpstreamT) -> None:
        leg = self._legs.get(upstream)
        if leg is None:
            number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
            self._numbers.add(number)
            leg = self._legs[upstream] = Leg.open(upstream, number, self._caller.remaining_s())
            self._spawn(self._read_leg(leg))
        _keep_open(leg)
        running.leg = leg
        running.num_here = 0
        leg.requests[running.request_id] = running
        if running.resumption is not None:
            running.resumption.admitted()
        await leg.begin(running)

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
            self._forget(leg)
        if isinstance(error, DeadlineError):
            raise error  # the deadline was the caller's
        ends = [self._lost(running, leg, error) for running in tuple(leg.requests.values())]
        await self._tell([end for end in ends if end is not None])
        self._numbers.discard(leg.number)  # the caller knows now that its slots are free

    async def _pass_on(self, leg: Leg[UpstreamT], frame: bytes) -> None:
        if has_only_columns(frame):
            if frame:
                await self._write(frame)
            return
        response = generation_pb2.GenerateManyResponse.FromString(frame)
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
                self._spawn(leg.write(Abort(running.request_id).message()))
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
        running.has_begun = True
        running.data = b""
        is_changed = running.resumption is not None and running.resumption.take(item.response)
        if item.response.HasField("usage"):
            self._end(running)
        return is_changed

    def _failed(self, running: Running[UpstreamT], leg: Leg[UpstreamT], item: _Item) -> _End | None:
        """What the caller is told instead of an error, None if the request goes on elsewhere."""
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
            return item if item is not None and answer is error else running.failed(answer)
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
        if not leg.requests and self._legs.get(leg.upstream) is leg:
            _keep_open(leg)
            leg.idle = asyncio.get_running_loop().call_later(IDLE_S, self._close, leg)

    def _close(self, leg: Leg[UpstreamT]) -> None:
        self._forget(leg)
        leg.call.cancel()

    def _forget(self, leg: Leg[UpstreamT]) -> None:
        _keep_open(leg)
        if self._legs.get(leg.upstream) is leg:
            del self._legs[leg.upstream]

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


def _keep_open(leg: Leg[Any]) -> None:
    if leg.idle is not None:
        leg.idle.cancel()
        leg.idle = None
