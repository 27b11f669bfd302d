"""Which requests of a batch are sent when, over a stream that does as the test says."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from genserve.client.generation.as_completed import CompletedStream
from genserve.client.generation.many import ManyItem
from genserve.errors import InvalidFieldError
from genserve.v1 import generation_pb2
from tests.support.scripted_engine import Gate


class ScriptedMany(AsyncIterator[ManyItem]):
    """As ManyStream: `writing` holds requests up on their way."""

    def __init__(self) -> None:
        self.writing: dict[str, Gate] = {}
        self.num_ids = 0
        self.items: asyncio.Queue[ManyItem | None] = asyncio.Queue()

    def next_id(self) -> str:
        """As ManyStream's."""
        self.num_ids += 1
        return f"r{self.num_ids}"

    async def put(self, message: generation_pb2.GenerateRequest) -> None:
        """As ManyStream's: the daemon may have the message long before this returns."""
        if (gate := self.writing.get(message.request_id)) is not None:
            gate.reached.set()
            await gate.open.wait()

    async def done(self) -> None:
        """As ManyStream's."""
        self.items.put_nowait(None)

    async def __anext__(self) -> ManyItem:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        """As ManyStream's."""
        self.items.put_nowait(None)

    def end(self, request_id: str) -> None:
        """The request ends, with an error, as that is the shortest way."""
        self.items.put_nowait(ManyItem(request_id, None, InvalidFieldError.of("text", "is empty")))


@pytest.fixture
def many() -> ScriptedMany:
    return ScriptedMany()


def completed(many: ScriptedMany, num_requests: int) -> CompletedStream:
    """A batch."""
    messages = [generation_pb2.GenerateRequest() for _ in range(num_requests)]
    return CompletedStream(many, messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_a_batch_ends_whose_answers_come_before_its_last_write_returns(
    many: ScriptedMany, num_requests: int
) -> None:
    """On a busy machine the daemon is done with them by then: nothing is still to come that could wake the sender."""
    last = many.writing[f"r{num_requests}"] = Gate()
    batch = completed(many, num_requests)
    await last.reached.wait()
    for number in range(1, num_requests + 1):
        many.end(f"r{number}")
        assert (await anext(batch))[0] == number - 1
    last.open.set()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(batch), 10)
