"""Many requests in one call: the stream of their items, and the output of many sequences as columns."""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Unpack

import grpc.aio

from genserve.client.generation.options import GenerateOptions, PromptLike, generate_request
from genserve.client.generation.results import Delta, Logprobs, Prompt, SequenceDelta, Usage, WeightSpan
from genserve.errors import GenserveError
from genserve.forward.caller import Failure
from genserve.transport.connection import Connection
from genserve.transport.errors import error_of_status
from genserve.transport.streams import EOF, AsyncClosing, FinalStatus, MessageReader
from genserve.v1 import generation_pb2, types_pb2


class SequenceRow(SequenceDelta):
    """New output of one of the n sequences, all under one weight version."""

    __slots__ = ("_columns", "_span", "_start", "index", "text", "token_ids")

    index: int
    text: str
    token_ids: list[int]

    def __init__(
        self, index: int, text: str, token_ids: list[int], span: WeightSpan, columns: Logprobs | None, start: int
    ) -> None:
        """`columns` are the log-probabilities of many rows, which begin at `start` for this one."""
        self.index = index
        self.text = text
        self.token_ids = token_ids
        self._span = span
        self._columns = columns
        self._start = start

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the new tokens, when asked for."""
        if self._columns is None:
            return None
        _, first, end, _ = self._span
        return self._columns.rows(self._start, self._start + end - first)

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """Of exactly the new tokens."""
        return [self._span]

    @property
    def finish(self) -> None:
        """The last delta of a sequence is an item."""

    @property
    def message(self) -> generation_pb2.SequenceDelta:
        """The message that an item would have had."""
        message = generation_pb2.SequenceDelta(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            weight_spans=[types_pb2.WeightSpan(**self._span._asdict())],
        )
        logprobs = self.logprobs
        if logprobs is not None:
            message.logprobs.width = logprobs.width
            message.logprobs.sampled.extend(logprobs.sampled)
            message.logprobs.ranks.extend(logprobs.ranks)
            message.logprobs.token_ids.extend(logprobs.token_ids)
            message.logprobs.values.extend(logprobs.values)
        return message


class RowsDelta(Delta):
    """The rows of one request: neither its first nor its last output."""

    __slots__ = ("_rows",)

    def __init__(self, rows: list[SequenceDelta]) -> None:
        self._rows = rows

    @property
    def request_id(self) -> str:
        """It was on the first message."""
        return ""

    @property
    def prompt(self) -> Prompt | None:
        """It was on the first message."""
        return None

    @property
    def outputs(self) -> list[SequenceDelta]:
        """The sequences with new output."""
        return self._rows

    @property
    def usage(self) -> Usage | None:
        """It comes with the last message."""
        return None

    @property
    def is_last(self) -> bool:
        """The last output is an item."""
        return False

    @property
    def text(self) -> str:
        """The new text of sequence 0."""
        return "".join(row.text for row in self._rows if row.index == 0)

    @property
    def message(self) -> generation_pb2.GenerateResponse:
        """The message that an item would have had."""
        return generation_pb2.GenerateResponse(outputs=[row.message for row in self._rows])


class _Sequence:
    """The sequence of a slot, and how many tokens it has."""

    __slots__ = ("index", "num_tokens", "request_id")

    def __init__(self, request_id: str, index: int) -> None:
        self.request_id = request_id
        self.index = index
        self.num_tokens = 0  # until its first item says how many it has


class Sequences:
    """The sequences of one stream that rows may be about, by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, _Sequence] = {}
        self._by_request: dict[str, list[int]] = {}

    def note(self, item: generation_pb2.GenerateManyItem) -> None:
        """Takes from an item which slots its request has, and how many tokens they have."""
        request_id = item.request_id
        if item.slots:
            self._by_request[request_id] = slots = list(item.slots)
            for index, slot in enumerate(slots):
                self._by_slot[slot] = _Sequence(request_id, index)
        elif request_id not in self._by_request:
            return
        if item.HasField("error") or item.response.HasField("usage"):
            self.forget(request_id)
            return
        slots = self._by_request[request_id]
        for output in item.response.outputs:
            if output.weight_spans and output.index < len(slots):
                self._by_slot[slots[output.index]].num_tokens = output.weight_spans[-1].end

    def forget(self, request_id: str) -> None:
        """A request has ended: its slots are free."""
        for slot in self._by_request.pop(request_id, ()):
            self._by_slot.pop(slot, None)

    def deltas(self, columns: generation_pb2.TokenColumns) -> Iterator[tuple[str, Delta]]:
        """The rows, as the request's id and a delta for each request. Raises GenserveError for a slot of no request."""
        request_id = ""
        rows: list[SequenceDelta] = []
        for slot, row in self._rows(columns):
            if rows and slot.request_id != request_id:
                yield request_id, RowsDelta(rows)
                rows = []
            request_id = slot.request_id
            rows.append(row)
        if rows:
            yield request_id, RowsDelta(rows)

    def _rows(self, columns: generation_pb2.TokenColumns) -> Iterator[tuple[_Sequence, SequenceDelta]]:
        version, lora_version, token_ids = columns.weight_version, columns.lora_version, list(columns.token_ids)
        texts = columns.texts or [""] * len(columns.slots)
        counts = columns.num_tokens or [1] * len(columns.slots)
        logprobs = Logprobs.of(columns.logprobs) if columns.HasField("logprobs") else None
        if not len(columns.slots) == len(texts) == len(counts):
            raise GenserveError(f"the daemon sent {len(columns.slots)} rows, {len(texts)} texts, {len(counts)} counts")
        start = 0
        for slot, text, num_tokens in zip(columns.slots, texts, counts, strict=True):
            sequence = self._by_slot.get(slot)
            if sequence is None:
                raise GenserveError(f"the daemon sent tokens for slot {slot}, which no request has")
            end = start + num_tokens
            first = sequence.num_tokens
            sequence.num_tokens = last = first + num_tokens
            span = WeightSpan(version, first, last, lora_version)
            yield sequence, SequenceRow(sequence.index, text, token_ids[start:end], span, logprobs, start)
            start = end


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
        connection: Connection,
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
    connection: Connection,
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
        with connection.typed_errors(target):
            raise status.failure from error
