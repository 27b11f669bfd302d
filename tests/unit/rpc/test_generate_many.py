"""What one GenerateMany call reads while its client does not, with a writer in the place of gRPC's buffers; and whose
request it refuses unread."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from genserve.control.state import StateBoard
from genserve.errors import QueueFullError
from genserve.rpc.generate_many import GenerateMany
from genserve.rpc.received import Received
from genserve.v1 import generation_pb2
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
            yield Received(generation_pb2.GenerateManyRequest, data, 1 << 20)

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
    [("a" * 256, True), ("\N{SNOWMAN}" * 256, True), ("\U0001f600" * 256, True), ("a" * 257, False), ("", False)],
)
async def test_a_request_that_is_too_long_to_be_read_is_refused_by_its_id(request_id: str, named: bool) -> None:
    """In any alphabet: an error without an id would end the whole stream. An id that is too long is none."""
    request = generation_pb2.GenerateRequest(request_id=request_id, text="x" * 5000)
    data = generation_pb2.GenerateManyRequest(generate=request).SerializeToString()
    refused: list[str] = []

    async def requests() -> AsyncIterator[Received[generation_pb2.GenerateManyRequest]]:
        yield Received(generation_pb2.GenerateManyRequest, data, 5000)

    async def write(response: generation_pb2.GenerateManyResponse) -> None:
        refused.extend(item.request_id for item in response.items)

    engine = ScriptedEngine()
    await GenerateMany(engine, StateBoard(engine, tuple, "test"), write).run(requests())
    assert refused == [request_id if named else ""]
