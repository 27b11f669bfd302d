"""Calls of GenerationService to the replicas of a fleet: they stand where a call of gRPC to one daemon does."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from genserve.client.direct.replicas import DirectReplicas
from genserve.errors import DeadlineError, GenserveError
from genserve.forward.caller import (
    Abort,
    AbortedWhileWaitingError,
    Action,
    Begun,
    Failure,
    Forwarded,
    Waiting,
    action_of,
)
from genserve.forward.generate import Generate
from genserve.forward.generate_many import GenerateMany
from genserve.transport.streams import EOF
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

T = TypeVar("T")
READ_AHEAD: Final = 8  # messages


class PipeEndedError(Exception):
    """Nothing more is read."""


class Pipe(Generic[T]):
    """Messages in order, and their end, for one writer and one reader."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._has_some = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: BaseException | None = None
        self.is_ended = False

    async def write(self, message: T) -> None:
        """Waits while the reader has not taken what was written before. Raises PipeEndedError after `end`."""
        await self._has_room.wait()
        if self.is_ended:
            raise PipeEndedError
        self._messages.append(message)
        self._has_some.set()
        if len(self._messages) >= READ_AHEAD:
            self._has_room.clear()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more is written. The reader gets what was written, and then the error."""
        if not self.is_ended:
            self.is_ended, self._error = True, error
            self._has_some.set()
            self._has_room.set()

    async def read(self) -> T | None:
        """The next message, None at the end. Raises the error of the end."""
        while not self._messages:
            if self.is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._has_some.clear()
            await self._has_some.wait()
        message = self._messages.popleft()
        self._has_room.set()
        return message

    @property
    def error(self) -> BaseException | None:
        """The error of the end."""
        return self._error


class Answer:
    """The answer of a replica, as bytes, or the failure of a call that no replica answered: the Caller of a forward."""

    def __init__(self, timeout_s: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self.ends_at_s = None if timeout_s is None else self._clock() + timeout_s
        self.messages: Pipe[bytes | Failure] = Pipe()

    def remaining_s(self) -> float | None:
        """The time until the deadline, None = there is none."""
        return None if self.ends_at_s is None else max(0.0, self.ends_at_s - self._clock())

    async def admitted(self) -> None:
        """Nobody waits for this."""

    async def write(self, data: bytes) -> None:
        """Passes on a message."""
        await self.messages.write(data)

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Reports requests that have failed."""
        for failure in failures:
            await self.messages.write(failure)

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """The error that is raised next says all that this client knows of it."""


class DirectCall:
    """A running call. `work` does it; it writes to the answer."""

    def __init__(self, answer: Answer, work: Callable[[], Awaitable[None]]) -> None:
        self._answer = answer
        self._running = asyncio.get_running_loop().create_task(self._run(work), name="a call to a fleet")
        self._running.add_done_callback(self._ended)

    async def read(self) -> Any:
        """The next message, or EOF. Raises the error that ended the call."""
        message = await self._answer.messages.read()
        return EOF if message is None else self._parsed(message)

    def keep(self, used: object) -> None:
        """Keeps an object alive until the call has ended."""
        self._running.add_done_callback(partial(_let_go, used))

    def cancel(self) -> bool:
        """Ends the call, and its requests."""
        return self._running.cancel()

    def abort_unread(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all, that nobody has begun yet. Returns their ids."""
        return []

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        error: BaseException | None = None
        try:
            async with asyncio.timeout_at(self._answer.ends_at_s):
                await work()
        except TimeoutError:
            error = DeadlineError("the call did not end within its timeout")
        except (Exception, asyncio.CancelledError) as raised:
            error = raised.with_traceback(None)
        self._end(error)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():  # before it had begun
            self._end(asyncio.CancelledError())

    def _end(self, error: BaseException | None) -> None:
        self._answer.messages.end(error)

    def _parsed(self, message: bytes | Failure) -> Any:
        raise NotImplementedError


def _let_go(*_: object) -> None:
    """The last use of an object that a call has kept."""


class DirectGenerate(DirectCall):
    """A call of Generate."""

    def __init__(
        self,
        replicas: DirectReplicas,
        waiting: Waiting,
        request: generation_pb2.GenerateRequest,
        timeout_s: float | None,
    ) -> None:
        answer = Answer(timeout_s)

        async def work() -> None:
            forwarded = Forwarded(request)
            try:
                await waiting.wait(forwarded.request_id, replicas.known_for(forwarded.request))
            except AbortedWhileWaitingError:
                return await answer.write(forwarded.aborted().SerializeToString())
            generate = Generate(replicas, waiting, replicas.tokenize, answer)
            await generate.run(forwarded, request.SerializeToString())

        super().__init__(answer, work)

    def _parsed(self, message: bytes | Failure) -> generation_pb2.GenerateResponse:
        assert isinstance(message, bytes)
        return generation_pb2.GenerateResponse.FromString(message)


class DirectGenerateMany(DirectCall):
    """A call of GenerateMany. `read` returns a Failure for a request that no replica answered."""

    def __init__(self, replicas: DirectReplicas, waiting: Waiting, timeout_s: float | None) -> None:
        answer = Answer(timeout_s)
        self._replicas = replicas
        self._waiting = waiting
        self._requests: Pipe[generation_pb2.GenerateManyRequest] = Pipe()
        self._unread: Counter[str] = Counter()  # ids of requests that nobody has begun yet
        self._aborted: set[str] = set()  # of those, the ones to end
        self._stream = GenerateMany(replicas, waiting, replicas.tokenize, answer)
        super().__init__(answer, lambda: self._stream.run(self._actions()))

    async def write(self, message: generation_pb2.GenerateManyRequest) -> None:
        """Sends a message. Raises what ended the call, InvalidStateError after its regular end, as gRPC does."""
        if message.HasField("generate"):
            self._unread[message.generate.request_id] += 1
        try:
            await self._requests.write(message)
        except PipeEndedError:
            error = self._answer.messages.error
            if isinstance(error, GenserveError):
                raise error.again() from None
            raise asyncio.InvalidStateError("the call takes no more messages") from None

    async def done_writing(self) -> None:
        """No more messages follow."""
        self._requests.end()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls nothing: unlike gRPC's call, this one gives its readers and writers the reason of its end."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests of this call, also after `done_writing`."""
        unread = self.abort_unread(request_ids)
        self._waiting.abort(unread)
        for request_id in request_ids:
            if request_id not in unread:
                await self._stream.abort(Abort(request_id))

    def abort_unread(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends those that have been written, and that nobody has begun yet."""
        found = [each for each in self._unread if request_ids is None or each in request_ids]
        self._aborted.update(found)
        return found

    def _begin(self, request_id: str) -> None:
        self._unread -= Counter((request_id,))

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._requests.end()

    def _parsed(self, message: bytes | Failure) -> generation_pb2.GenerateManyResponse | Failure:
        return message if isinstance(message, Failure) else generation_pb2.GenerateManyResponse.FromString(message)

    async def _actions(self) -> AsyncIterator[Action]:
        while (message := await self._requests.read()) is not None:
            action = action_of(message)
            if not isinstance(action, Begun):
                if message.HasField("generate"):  # it is refused
                    self._begin(message.generate.request_id)
                    if message.generate.request_id not in self._unread:
                        self._aborted.discard(message.generate.request_id)
                yield action
                continue
            request_id = action.forwarded.request_id
            try:
                if request_id not in self._aborted:
                    await self._waiting.wait(request_id, self._replicas.known_for(action.forwarded.request))
            except AbortedWhileWaitingError:
                self._aborted.add(request_id)
            except GenserveError as error:
                action = Failure(request_id, error.with_traceback(None))
            self._begin(request_id)
            yield action
            if request_id in self._aborted:
                self._aborted.discard(request_id)
                yield Abort(request_id)
