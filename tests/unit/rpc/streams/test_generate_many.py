"""What one GenerateMany call reads while its client does not, with a writer in the place of gRPC's buffers; and whose
request it refuses unread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from genserve.control.state import StateBoard
from genserve.engine.aborted import AbortedStream
from genserve.engine.generation import (
    GenerationRequest,
    GenerationUpdate,
    LogprobColumns,
    Output,
    PromptInfo,
    Sampling,
    SequenceDelta,
)
from genserve.errors import QueueFullError
from genserve.rpc.received import Received
from genserve.rpc.streams.generate_many import GenerateMany
from genserve.v1 import generation_pb2
from tests.support.patience import turns
from tests.support.scripted_engine import ScriptedEngine

REFUSALS_PER_MESSAGE = 256
"""At most 4 KiB each, in messages of at most 1 MiB."""


class Full(ScriptedEngine):
    """Refuses every request."""

    async def submit(self, request: object) -> None:  # type: ignore[override]
        raise QueueFullError("full")


class Caller:
    """A client that asks for `num_requests`, and takes no message before `takes` is set."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.num_read = 0
        self.takes = asyncio.Event()
        self.sizes: list[int] = []

    async def requests(self) -> AsyncIterator[Received[generation_pb2.GenerateManyRequest]]:
        """As gRPC gives them, without a pause."""
        for number in range(self.num_requests):
            self.num_read += 1
            request = generation_pb2.GenerateRequest(request_id=str(number), text="x")
            data = generation_pb2.GenerateManyRequest(generate=request).SerializeToString()
            yield Received(generation_pb2.GenerateManyRequest, 1 << 20, data)

    async def write(self, response: generation_pb2.GenerateManyResponse) -> None:
        """As gRPC does, which has room for a message when the one before is taken."""
        await self.takes.wait()
        self.sizes.append(len(response.items))


async def test_no_more_refusals_wait_than_two_messages_have() -> None:
    """One that is being written, and the next. When the client reads, all come, in messages that are full."""
    engine, caller = Full(), Caller(10 * REFUSALS_PER_MESSAGE)
    board = StateBoard(engine, tuple, "test")
    running = asyncio.create_task(GenerateMany(engine, board, caller.write).run(caller.requests()))
    before = -1
    while before != caller.num_read:  # nothing else happens on this loop
        before = caller.num_read
        for _ in range(10):
            await asyncio.sleep(0)
    assert REFUSALS_PER_MESSAGE <= caller.num_read <= 2 * REFUSALS_PER_MESSAGE
    caller.takes.set()
    await running
    assert sum(caller.sizes) == caller.num_requests
    assert max(caller.sizes) == REFUSALS_PER_MESSAGE


@pytest.mark.parametrize(
    ("request_id", "named"),
    [
        ("a" * 256, True),
        ("\N{SNOWMAN}" * 256, True),
        ("\U0001f600" * 256, True),
        ("a" * 257, False),
        ("\U0001f600" * 257, False),
        ("a" * 4000, False),
        ("", False),
    ],
)
async def test_a_request_that_is_too_long_to_be_read_is_refused_by_its_id(request_id: str, named: bool) -> None:
    """In any alphabet: an error without an id would end the whole stream. An id that is too long is none."""
    request = generation_pb2.GenerateRequest(request_id=request_id, text="x" * 5000)
    data = generation_pb2.GenerateManyRequest(generate=request).SerializeToString()
    refused: list[str] = []

    async def requests() -> AsyncIterator[Received[generation_pb2.GenerateManyRequest]]:
        yield Received(generation_pb2.GenerateManyRequest, 5000, data)

    async def write(response: generation_pb2.GenerateManyResponse) -> None:
        refused.extend(item.request_id for item in response.items)

    engine = ScriptedEngine()
    await GenerateMany(engine, StateBoard(engine, tuple, "test"), write).run(requests())
    assert refused == [request_id if named else ""]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\x0a\x03\x0a\x01a", "a"),  # generate { request_id }
        (b"\x0a\x06\x1a\x01x\x0a\x01a", ""),  # generate { another field, request_id }
        (b"\x12\x01a\x0a\x03\x0a\x01a", ""),  # abort, generate
        (b"\x0a\x03", ""),
        (b"\x0a" + b"\xff" * 10, ""),
        (b"\x0a\x04\x0a\x02\xff\xff", ""),
    ],
)
async def test_a_request_is_named_only_where_its_id_is_surely_one(data: bytes, named: str) -> None:
    """What was not written as clients write it, is cut off or is no text, names nobody."""
    refused: list[str] = []

    async def requests() -> AsyncIterator[Received[generation_pb2.GenerateManyRequest]]:
        yield Received(generation_pb2.GenerateManyRequest, 0, data)

    async def write(response: generation_pb2.GenerateManyResponse) -> None:
        refused.extend(item.request_id for item in response.items)

    engine = ScriptedEngine()
    await GenerateMany(engine, StateBoard(engine, tuple, "test"), write).run(requests())
    assert refused == [named]


class Given:
    """A request whose only update is there at once."""

    def __init__(self, request_id: str, update: GenerationUpdate) -> None:
        self.request_id = request_id
        self.is_finished = False
        self._update = update

    def take(self) -> GenerationUpdate | None:
        self.is_finished = True
        return self._update

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        callback()

    def abort(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


class Giving(ScriptedEngine):
    """Answers every request with one update, at once."""

    def __init__(self, update: GenerationUpdate) -> None:
        super().__init__()
        self._update = update

    async def submit(self, request: GenerationRequest) -> Given:
        return Given(request.request_id, self._update)


def columns(num_values: int = 0, num_sampled: int = 0) -> LogprobColumns:
    return LogprobColumns([0.0] * num_sampled, [], 0, [], [0.0] * num_values)


def delta(text: str = "", num_tokens: int = 0, logprobs: LogprobColumns | None = None) -> SequenceDelta:
    return SequenceDelta(0, [7] * num_tokens, text, logprobs, [], None)


MAX_VALUES, VALUES_PER_ITEM = 1 << 17, 128
HALF = MAX_VALUES // 2 - VALUES_PER_ITEM
"""Two items of so many values are a message."""


@pytest.mark.parametrize(
    "update",
    [
        lambda n: GenerationUpdate(None, [delta(text="x" * n)], None),
        lambda n: GenerationUpdate(None, [delta(num_tokens=n)], None),
        lambda n: GenerationUpdate(None, [delta(logprobs=columns(num_values=n))], None),
        lambda n: GenerationUpdate(None, [delta(logprobs=columns(num_sampled=n))], None),
        lambda n: GenerationUpdate(None, [delta("x" * 5, 4, columns(3, 2)), delta(text="x" * (n - 14))], None),
        lambda n: GenerationUpdate(PromptInfo(n, 0, [7] * n, None), [], None),
        lambda n: GenerationUpdate(PromptInfo(n, 0, None, columns(num_values=n)), [], None),
        lambda n: GenerationUpdate(PromptInfo(3, 0, [7] * 3, columns(4)), [delta(num_tokens=n - 7)], None),
    ],
)
@pytest.mark.parametrize(("num_values", "sizes"), [(HALF, [2, 1]), (HALF - 1, [3])])
async def test_message_is_full_with_the_item_that_reaches_its_value_limit(
    update: Callable[[int], GenerationUpdate], num_values: int, sizes: list[int]
) -> None:
    """Tokens, characters and log-probabilities of prompt and output count, and each item for itself: clients take
    4 MiB by default, and the loop must not build one message for long."""
    engine, caller = Giving(update(num_values)), Caller(3)
    caller.takes.set()
    await GenerateMany(engine, StateBoard(engine, tuple, "test"), caller.write).run(caller.requests())
    assert caller.sizes == sizes


class Ending(ScriptedEngine):
    """Ends every request while it is admitted."""

    async def submit(self, request: GenerationRequest) -> AbortedStream:
        return AbortedStream(replace(request, sampling=Sampling(n=1024), output=Output(logprobs=0)))


@pytest.mark.slow
async def test_message_of_many_aborted_sequences_stays_below_a_clients_limit() -> None:
    """Each has an index, a reason and a sum of log-probabilities: what 4 MiB are soon full of. And the loop must not
    build one message for long."""
    engine, caller = Ending(), Caller(300)  # of which 256 wait at once
    num_bytes: list[int] = []

    async def write(response: generation_pb2.GenerateManyResponse) -> None:
        num_bytes.append(response.ByteSize())
        await caller.write(response)

    running = asyncio.create_task(GenerateMany(engine, StateBoard(engine, tuple, "test"), write).run(caller.requests()))
    await turns(2_000)
    caller.takes.set()
    await running
    assert sum(caller.sizes) == caller.num_requests
    assert max(num_bytes) < 4 << 20
