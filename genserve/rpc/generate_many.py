"""The requests of one GenerateMany call: begun as they come in, and read together, one message a step of the engine."""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from genserve.control.admission import check_admission
from genserve.control.state import StateBoard
from genserve.engine.base import Engine, GenerationStream
from genserve.engine.generation import GenerationUpdate
from genserve.errors import GenserveError, InvalidFieldError
from genserve.rpc.convert_request import generation_request
from genserve.rpc.convert_response import fill_response
from genserve.rpc.status import internal_error, to_message
from genserve.v1 import generation_pb2

METHOD = "GenerateMany"
# Of the values that dominate a message (tokens, alternatives, characters), so that none comes near the 4 MiB that
# clients take by default. What is left over goes with the next message, at once.
_MAX_VALUES = 1 << 17

Requests = AsyncIterator[generation_pb2.GenerateManyRequest]
Write = Callable[[generation_pb2.GenerateManyResponse], Awaitable[None]]


class GenerateMany:
    """One call. `run` it once.

    The engine's step puts its outputs, in one go, into streams that only note that they are ready; one task wakes up
    then and writes one message. While a message cannot be written, because the client does not read, the streams merge
    what comes: memory is bounded by the outputs themselves.
    """

    def __init__(self, engine: Engine, board: StateBoard, write: Write) -> None:
        self._engine = engine
        self._board = board
        self._write = write
        self._streams: dict[str, GenerationStream] = {}
        self._ready: deque[GenerationStream] = deque()
        self._refused: deque[tuple[str, GenserveError]] = deque()
        self._wake = asyncio.Event()

    async def run(self, requests: Requests) -> None:
        """Returns when the client has closed its side and every request has ended; ends what runs when cancelled."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not reading.done() or self._streams or self._refused:
                await self._wake.wait()
                self._wake.clear()
                if reading.done():
                    reading.result()  # raises what is wrong with the client's side
                while self._ready or self._refused:
                    response = self._next_response()
                    if response.items:
                        await self._write(response)
        finally:
            reading.cancel()
            # Shielded, for a second cancellation would leave requests running.
            await asyncio.shield(self._close(reading))

    async def _read(self, requests: Requests) -> None:
        async for message in requests:
            kind = message.WhichOneof("action")
            if kind == "generate":
                await self._begin(message.generate)
            elif kind == "abort":
                if message.abort in self._streams:
                    await self._engine.abort([message.abort])
            else:
                raise InvalidFieldError.of("action", "is required: generate or abort")

    async def _begin(self, message: generation_pb2.GenerateRequest) -> None:
        request_id = message.request_id or uuid.uuid4().hex
        try:
            check_admission(self._board.phase)
            stream = await self._engine.submit(generation_request(message, minted_id=request_id))
        except Exception as error:
            self._refuse(request_id, error)
            return
        self._streams[request_id] = stream
        stream.call_when_ready(partial(self._note, stream))

    def _refuse(self, request_id: str, error: Exception) -> None:
        known = error if isinstance(error, GenserveError) else internal_error(error, METHOD)
        self._refused.append((request_id, known.with_traceback(None)))
        self._wake.set()

    def _note(self, stream: GenerationStream) -> None:
        self._ready.append(stream)
        self._wake.set()

    def _next_response(self) -> generation_pb2.GenerateManyResponse:
        response = generation_pb2.GenerateManyResponse()
        add = response.items.add
        while self._refused:
            request_id, error = self._refused.popleft()
            add(request_id=request_id, error=to_message(error))
        num_values = 0
        while self._ready and num_values < _MAX_VALUES:
            stream = self._ready.popleft()
            request_id = stream.request_id
            try:
                update = stream.take()
            except GenserveError as error:
                add(request_id=request_id, error=to_message(error))
            else:
                if update is not None:
                    fill_response(add(request_id=request_id).response, update, request_id)
                    num_values += _num_values(update)
            if stream.is_finished:
                self._streams.pop(request_id, None)
        return response

    async def _close(self, reading: "asyncio.Task[None]") -> None:
        await asyncio.wait([reading])  # it may be about to begin another request
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))


def _num_values(update: GenerationUpdate) -> int:
    """How many values an update has, roughly."""
    prompt = update.prompt
    num_values = 0 if prompt is None else len(prompt.token_ids or ())
    if prompt is not None and prompt.logprobs is not None:
        num_values += len(prompt.logprobs.values)
    for delta in update.outputs:
        num_values += len(delta.token_ids) + len(delta.text)
        if delta.logprobs is not None:
            num_values += len(delta.logprobs.values) + len(delta.logprobs.sampled)
    return num_values
