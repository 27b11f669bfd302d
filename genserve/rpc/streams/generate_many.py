"""The requests of one GenerateMany call: begun as they arrive, and read together, one message per step of the
engine."""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from genserve.arguments import MAX_TEXT_CHARS
from genserve.control.phase_admission import HasPhase, check_generation
from genserve.engine.generation import GenerationRequest, GenerationUpdate
from genserve.engine.protocol import GeneratingEngine, GenerationStream
from genserve.errors import GenserveError, InvalidFieldError
from genserve.log_context import about
from genserve.rpc.convert.generation_request import generation_request
from genserve.rpc.convert.generation_response import fill_response
from genserve.rpc.convert.token_columns import ColumnsOfStep, Slots
from genserve.rpc.received import Received
from genserve.rpc.status import known_error, to_message
from genserve.tensors.varint import read_varint
from genserve.v1 import generation_pb2

METHOD = "GenerateMany"
# Of the values that dominate a message (tokens, alternatives, characters), so that none comes near the 4 MiB that
# clients take by default. What is left over goes with the next message, at once.
_MAX_VALUES = 1 << 17
# The cost of an item besides its values, in time: building a message of thousands of items would block the loop.
_VALUES_PER_ITEM = 128
# Refusals per message: each has at most 4 KiB. If as many wait to be written, no further requests are read.
_MAX_REFUSALS = 256

_MAX_ID_BYTES = 4 * MAX_TEXT_CHARS  # in UTF-8
_FIRST_FIELD = 0x0A  # the tag of `generate` in GenerateManyRequest, and of `request_id` in that
_FORMS = {
    generation_pb2.GENERATE_MANY_FORM_UNSPECIFIED: False,
    generation_pb2.GENERATE_MANY_FORM_ITEMS: False,
    generation_pb2.GENERATE_MANY_FORM_COLUMNS: True,
}
"""The forms of output -> whether it may be told in columns."""

Requests = AsyncIterator[Received[generation_pb2.GenerateManyRequest]]
Write = Callable[[generation_pb2.GenerateManyResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Action:
    """The action of a message: begin `request`, or end the request with `request_id`; or its error."""

    request_id: str
    request: GenerationRequest | None = None
    error: GenserveError | None = None
    in_columns: bool = False


@dataclass(slots=True)
class _Running:
    """A request that has begun. `slots`: the numbers of its sequences in columns, None before its first item;
    `num_slots`: how many it needs, 0 if its output comes as items."""

    stream: GenerationStream
    num_slots: int
    slots: list[int] | None = None


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
        self._running: dict[str, _Running] = {}
        self._slots = Slots() if slots is None else slots
        self._ready: deque[_Running] = deque()
        self._refused: deque[tuple[str, GenserveError]] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, requests: Requests) -> None:
        """Returns when the client has closed its side and every request has ended. Ends running requests if it is
        cancelled."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not reading.done() or self._running or self._refused:
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
            elif (running := self._running.get(action.request_id)) is not None:
                running.stream.abort()  # and not by its id, which may be in use at another front end as well

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

    async def _begin(self, request: GenerationRequest, *, in_columns: bool) -> None:
        try:
            check_generation(self._board.phase)
            with about(request.request_id):
                stream = await self._engine.submit(request)
        except Exception as error:
            await self._refuse(request.request_id, error)
            return
        running = _Running(stream, (request.sampling.n or 1) if in_columns else 0)
        self._running[request.request_id] = running
        stream.call_when_ready(partial(self._note, running))

    async def _refuse(self, request_id: str, error: Exception) -> None:
        with about(request_id):
            self._refused.append((request_id, known_error(error, METHOD).with_traceback(None)))
        self._wake.set()
        while len(self._refused) >= _MAX_REFUSALS:
            self._room.clear()
            await self._room.wait()

    def _note(self, running: _Running) -> None:
        self._ready.append(running)
        self._wake.set()

    def _next_response(self) -> generation_pb2.GenerateManyResponse:
        response = generation_pb2.GenerateManyResponse()
        add = response.items.add
        for _ in range(min(len(self._refused), _MAX_REFUSALS)):
            request_id, error = self._refused.popleft()
            add(request_id=request_id, error=to_message(error))
        self._room.set()
        columns = ColumnsOfStep()
        num_values = 0
        while self._ready and num_values < _MAX_VALUES:
            running = self._ready.popleft()
            stream = running.stream
            try:
                update = stream.take()
            except Exception as error:
                with about(stream.request_id):
                    add(request_id=stream.request_id, error=to_message(known_error(error, METHOD)))
            else:
                if update is None:
                    pass
                elif running.slots is not None and (num_added := columns.add(running.slots, update)):
                    num_values += num_added
                else:
                    self._fill(add(request_id=stream.request_id), running, update)
                    num_values += _VALUES_PER_ITEM + _num_values(update)
            if stream.is_finished and self._running.get(stream.request_id) is running:
                del self._running[stream.request_id]
                self._slots.free(running.slots or ())
        columns.fill(response)
        self._slots.end_message()
        return response

    def _fill(self, item: generation_pb2.GenerateManyItem, running: _Running, update: GenerationUpdate) -> None:
        fill_response(item.response, update, running.stream.request_id)
        if running.slots is None and running.num_slots and update.usage is None:
            slots = self._slots.take(running.num_slots)
            if slots:
                running.slots = slots
                item.slots.extend(slots)
            else:
                running.num_slots = 0  # it goes on in items

    async def _close(self, reading: "asyncio.Task[None]") -> None:
        await asyncio.wait([reading])  # it may be about to begin another request
        await asyncio.gather(*(running.stream.close() for running in self._running.values()))


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


def _num_values(update: GenerationUpdate) -> int:
    """The approximate number of values in an update."""
    prompt = update.prompt
    num_values = 0 if prompt is None else len(prompt.token_ids or ())
    if prompt is not None and prompt.logprobs is not None:
        num_values += len(prompt.logprobs.values)
    for delta in update.outputs:
        num_values += len(delta.token_ids) + len(delta.text)
        if delta.logprobs is not None:
            num_values += len(delta.logprobs.values) + len(delta.logprobs.sampled)
    return num_values
