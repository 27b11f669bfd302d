"""The requests of one GenerateMany call: begun as they arrive, and read together, one message per step of the
engine."""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from genserve.aio import cancel_all
from genserve.control.conditions import HasPhase, check_generation
from genserve.engine.aborted import AbortedStream, Admission
from genserve.engine.generation import GenerationRequest
from genserve.engine.protocol import GeneratingEngine, GenerationStream
from genserve.errors import GenserveError, InvalidFieldError, RequestIdInUseError, UnavailableError
from genserve.observe.log_lines import REQUEST_ID, about
from genserve.rpc.convert.generation_request import generation_request
from genserve.rpc.convert.token_columns import Slots
from genserve.rpc.received import Received
from genserve.rpc.status import known_error
from genserve.rpc.streams.next_message import MAX_VALUES, METHOD, NextMessage, Running
from genserve.tensors.varint import read_varint
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_TEXT_CHARS

# Refusals per message: each has at most 4 KiB. If as many wait to be written, or ends of requests that the engine never
# had and does not count, no further requests are read.
_MAX_REFUSALS = 256
# Requests that are being admitted at once: one with a constraint may take seconds, and aborts are behind it.
_MAX_ADMISSIONS = 64

_MAX_ID_BYTES = 4 * MAX_TEXT_CHARS  # in UTF-8
_FIRST_FIELD = 0x0A  # the tag of `generate` in GenerateManyRequest, and of `request_id` in that
_FORMS = {
    generation_pb2.GENERATE_MANY_FORM_UNSPECIFIED: False,
    generation_pb2.GENERATE_MANY_FORM_ITEMS: False,
    generation_pb2.GENERATE_MANY_FORM_COLUMNS: True,
}
"""The forms of output -> whether answers may have columns."""

Requests = AsyncIterator[Received[generation_pb2.GenerateManyRequest]]
Write = Callable[[generation_pb2.GenerateManyResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Action:
    """The action of a message: begin `request`, or end the request with `request_id`; or its error."""

    request_id: str
    request: GenerationRequest | None = None
    error: GenserveError | None = None
    in_columns: bool = False


class GenerateMany:
    """One call. `run` it once.

    The engine's step puts its outputs, in one go, into streams that only note that they are ready; one task wakes up
    then and writes one message. While a message cannot be written, because the client does not read, the streams merge
    what comes: memory is bounded by the outputs themselves.
    """

    def __init__(self, engine: GeneratingEngine, board: HasPhase, write: Write, slots: Slots | None = None) -> None:
        self._engine = engine
        self._board = board
        self._write = write
        self._admissions: dict[str, Admission] = {}
        self._asking: set[asyncio.Task[GenerationStream]] = set()
        self._running: dict[str, Running] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._slots = Slots() if slots is None else slots
        self._ready: deque[Running] = deque()
        self._refused: deque[tuple[str, GenserveError]] = deque()
        self._num_aborted = 0  # before the engine had them; their ends are not written yet
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, requests: Requests) -> None:
        """Returns when the client has closed its side and every request has ended. Ends running requests if it is
        cancelled."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not reading.done() or self._admissions or self._running or self._refused:
                await self._wake.wait()
                self._wake.clear()
                if reading.done():
                    reading.result()  # raises the error of the client's side
                while self._ready or self._refused:
                    response = self._next_response()
                    if response.items or response.columns:
                        await self._write(response)
        finally:
            reading.cancel()
            # Shielded, because a second cancellation would leave requests running.
            await asyncio.shield(self._close(reading))

    async def _read(self, requests: Requests) -> None:
        async for received in requests:
            try:
                action = await received.read(self._action)
            except Exception as error:  # too large to be read, or not a message
                await self._refuse(named_in(received.head), error)
                continue
            if action.error is not None:
                await self._refuse(action.request_id, action.error)
            elif action.request is not None:
                await self._begin(action.request, in_columns=action.in_columns)
            else:
                self._abort(action.request_id)

    def _action(self, message: generation_pb2.GenerateManyRequest) -> _Action:
        kind = message.WhichOneof("action")
        if kind == "abort":
            return _Action(message.abort)
        if kind is None:
            return _Action("", error=InvalidFieldError.of("action", "is required: generate or abort"))
        request_id = message.generate.request_id or uuid.uuid4().hex
        try:
            in_columns = _FORMS.get(message.form)
            if in_columns is None:
                raise InvalidFieldError.of("form", f"{message.form} is no form that this daemon knows")
            request = generation_request(message.generate, self._engine.info, request_id)
            return _Action(request_id, request, in_columns=in_columns)
        except GenserveError as error:
            return _Action(request_id[:MAX_TEXT_CHARS], error=error)

    def _abort(self, request_id: str) -> None:
        # Not by asking the engine for its id, which may be in use at another front end as well.
        if (running := self._running.get(request_id)) is not None:
            running.stream.abort()
        elif (admission := self._admissions.get(request_id)) is not None:
            admission.abort()

    async def _begin(self, request: GenerationRequest, *, in_columns: bool) -> None:
        """Has the engine admit a request, beside those that follow."""
        if request.request_id in self._admissions or request.request_id in self._running:
            await self._refuse(request.request_id, RequestIdInUseError.of(request.request_id))
            return
        admission = self._admissions[request.request_id] = Admission(request)
        asking = asyncio.create_task(admission.run(partial(self._submit, request)))
        self._asking.add(asking)
        asking.add_done_callback(lambda _: self._admitted(request, asking, in_columns=in_columns))
        await self._wait_for_room()

    async def _submit(self, request: GenerationRequest) -> GenerationStream:
        check_generation(self._board)
        REQUEST_ID.set(request.request_id)
        return await self._engine.submit(request)

    def _admitted(
        self, request: GenerationRequest, asking: "asyncio.Task[GenerationStream]", *, in_columns: bool
    ) -> None:
        admission = self._admissions.pop(request.request_id)
        self._asking.discard(asking)
        try:
            stream = asking.result()
        except asyncio.CancelledError:
            self._note_refusal(request.request_id, UnavailableError("the daemon has ended the admission"))
        except Exception as error:
            self._note_refusal(request.request_id, error)
        else:
            running = Running(stream, (request.sampling.n or 1) if in_columns else 0)
            self._running[request.request_id] = running
            self._num_aborted += isinstance(stream, AbortedStream)
            if admission.is_aborted:
                stream.abort()
            stream.call_when_ready(partial(self._note, running))
        self._wake.set()
        self._room.set()

    async def _refuse(self, request_id: str, error: Exception) -> None:
        self._note_refusal(request_id, error)
        await self._wait_for_room()

    def _note_refusal(self, request_id: str, error: Exception) -> None:
        with about(request_id):
            self._refused.append((request_id, known_error(error, METHOD).with_traceback(None)))
        self._wake.set()

    async def _wait_for_room(self) -> None:
        """Returns when further requests may be read."""
        while (
            len(self._admissions) >= _MAX_ADMISSIONS
            or len(self._admissions) + len(self._refused) + self._num_aborted >= _MAX_REFUSALS
        ):
            self._room.clear()
            await self._room.wait()

    def _note(self, running: Running) -> None:
        if running.parts is None:  # otherwise it is taken until nothing is left
            self._ready.append(running)
            self._wake.set()

    def _next_response(self) -> generation_pb2.GenerateManyResponse:
        message = NextMessage(self._slots, self._failed)
        for _ in range(min(len(self._refused), _MAX_REFUSALS)):
            message.refuse(*self._refused.popleft())
        unfinished: list[Running] = []
        while self._ready and message.num_values < MAX_VALUES:
            running = self._ready.popleft()
            if running.has_failed:
                continue
            message.add(running)
            if running.stream.is_finished and not running.parts:
                self._forget(running)
            elif running.parts is not None:
                unfinished.append(running)
        self._ready += unfinished  # for the next message
        response = message.finish()
        self._slots.end_message()
        self._room.set()
        return response

    def _failed(self, running: Running) -> None:
        self._forget(running)
        if not running.stream.is_finished:
            closing = asyncio.create_task(running.stream.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _forget(self, running: Running) -> None:
        if self._running.get(running.stream.request_id) is running:
            del self._running[running.stream.request_id]
            self._num_aborted -= isinstance(running.stream, AbortedStream)
            self._slots.free(running.slots or ())

    async def _close(self, reading: "asyncio.Task[None]") -> None:
        await asyncio.wait([reading])  # it may be about to begin another request
        await cancel_all(list(self._asking))
        await asyncio.gather(*(running.stream.close() for running in self._running.values()), *self._closing)


def named_in(head: bytes) -> str:
    """The id of the request at the beginning of an unparsed GenerateManyRequest; "" if the client did not write it
    first."""
    try:
        if head[0] != _FIRST_FIELD or head[(start := read_varint(head, 1)[1])] != _FIRST_FIELD:
            return ""
        length, start = read_varint(head, start + 1)
        if length > _MAX_ID_BYTES:
            return ""
        request_id = head[start : start + length].decode()
        return request_id if len(request_id) <= MAX_TEXT_CHARS else ""
    except (IndexError, ValueError):
        return ""
