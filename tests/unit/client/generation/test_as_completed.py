"""Which requests of a batch are sent when, over a stream that does as the test says."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from genserve.client.generation import calls
from genserve.client.generation.calls import CompletedStream
from genserve.client.generation.many import ManyItem, StreamOverError
from genserve.client.generation.results import Delta
from genserve.errors import EngineDeadError, GenserveError, InvalidFieldError, QueueFullError
from genserve.v1 import generation_pb2
from tests.support.clocks import leaping_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate

EMPTY = InvalidFieldError.of("text", "is empty")


class ScriptedMany(AsyncIterator[ManyItem]):
    """As ManyStream: `writing` holds requests up on their way, `fails` is raised instead of sending one. `bursts` are
    the numbers of requests that were sent at once, without a turn of the loop between them."""

    def __init__(self) -> None:
        self.writing: dict[str, Gate] = {}
        self.fails: Exception | None = None
        self.sent: list[str] = []
        self.bursts: list[int] = []
        self.is_bursting = False
        self.num_ids = 0
        self.items: asyncio.Queue[ManyItem | None] = asyncio.Queue()

    def next_id(self) -> str:
        """As ManyStream's."""
        self.num_ids += 1
        return f"r{self.num_ids}"

    async def put(self, message: generation_pb2.GenerateRequest) -> None:
        """As ManyStream's: the daemon may have the message long before this returns."""
        if self.fails is not None:
            raise self.fails
        self.sent.append(message.request_id)
        if not self.is_bursting:
            self.is_bursting = True
            self.bursts.append(0)
            asyncio.get_running_loop().call_soon(self._end_burst)
        self.bursts[-1] += 1
        if (gate := self.writing.get(message.request_id)) is not None:
            gate.reached.set()
            await gate.open.wait()

    def _end_burst(self) -> None:
        self.is_bursting = False

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

    def end(self, request_id: str, error: GenserveError = EMPTY) -> None:
        """The request ends, with an error, as that is the shortest way."""
        self.items.put_nowait(ManyItem(request_id, None, error))

    def begin(self, request_id: str) -> None:
        """The daemon tells of its prompt."""
        prompt = generation_pb2.Prompt(num_tokens=3)
        self.items.put_nowait(ManyItem(request_id, Delta(generation_pb2.GenerateResponse(prompt=prompt)), None))

    async def has_sent(self, *request_ids: str) -> None:
        """Returns when these were sent, and no others: whoever sends has had its turns."""
        await turns()
        assert self.sent == list(request_ids)


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
        await asyncio.wait_for(anext(batch), STEP_S)


async def test_a_batch_that_is_dropped_leaves_no_task(many: ScriptedMany) -> None:
    """None sends for it any more."""
    before = asyncio.all_tasks()
    batch = completed(many, 2)
    its_tasks = asyncio.all_tasks() - before
    await many.has_sent("r1", "r2")
    del batch
    gc.collect()
    await until(lambda: all(task.done() for task in its_tasks))


async def test_no_more_run_at_once_than_a_daemon_takes_of_all_its_clients(
    many: ScriptedMany, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends makes room for one."""
    monkeypatch.setattr(calls, "MAX_IN_FLIGHT", 2)
    batch = completed(many, 4)
    await many.has_sent("r1", "r2")
    many.end("r2")
    assert (await anext(batch))[0] == 1
    await many.has_sent("r1", "r2", "r3")
    batch.cancel()


async def test_what_is_refused_is_sent_again_when_there_is_room(many: ScriptedMany) -> None:
    """First of all, and not before one has ended, whatever is left of the delay that the daemon gave."""
    batch = completed(many, 3)
    await many.has_sent("r1", "r2", "r3")
    many.end("r2", QueueFullError("full", retry_after_s=60.0))
    many.end("r3", QueueFullError("full", retry_after_s=60.0))
    reading = asyncio.create_task(anext(batch))
    await many.has_sent("r1", "r2", "r3")
    many.end("r1")
    assert (await reading)[0] == 0
    await many.has_sent("r1", "r2", "r3", "r3")
    many.end("r3")
    position, generation = await anext(batch)
    assert (position, generation.error) == (2, EMPTY)
    await many.has_sent("r1", "r2", "r3", "r3", "r2")
    batch.cancel()


@pytest.mark.parametrize(("retry_after_s", "delay_s"), [(3.0, 3.0), (None, 0.5)])
async def test_what_is_refused_is_sent_again_after_a_delay(
    many: ScriptedMany, retry_after_s: float | None, delay_s: float
) -> None:
    """Others may have made room meanwhile: twice as many may run then."""
    with leaping_clock():
        batch = completed(many, 3)
        await many.has_sent("r1", "r2", "r3")
        for request_id in ("r1", "r2", "r3"):
            many.end(request_id, QueueFullError("full", retry_after_s=retry_after_s))
        refused_s = asyncio.get_running_loop().time()
        reading = asyncio.create_task(anext(batch))
        await until(lambda: len(many.sent) > 3)
        assert asyncio.get_running_loop().time() - refused_s == pytest.approx(delay_s, abs=0.02)
        await until(lambda: len(many.sent) >= 6)
        assert sorted(many.sent[3:]) == ["r1", "r2", "r3"]
        many.end("r1")
        assert (await reading)[0] == 0
        batch.cancel()
        await turns()


async def test_with_each_delay_twice_as_many_may_run_until_as_many_as_ever(
    many: ScriptedMany, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one would take a large batch for ever; all at once would be refused again."""
    monkeypatch.setattr(calls, "MAX_IN_FLIGHT", 7)
    with leaping_clock():
        batch = completed(many, 9)
        await many.has_sent(*(f"r{number}" for number in range(1, 8)))
        for number in range(1, 8):
            many.end(f"r{number}", QueueFullError("full", retry_after_s=3.0))
        reading = asyncio.create_task(anext(batch))
        await until(lambda: len(many.sent) >= 14)
        assert many.bursts == [7, 2, 2, 3]
        many.end("r1")
        assert (await reading)[0] == 0
        batch.cancel()
        await turns()


async def test_a_request_that_has_begun_is_not_sent_again(many: ScriptedMany) -> None:
    """Its caller may have seen a part of it."""
    batch = completed(many, 1)
    await many.has_sent("r1")
    many.begin("r1")
    full = QueueFullError("full")
    many.end("r1", full)
    position, generation = await anext(batch)
    assert (position, generation.error) == (0, full)
    assert generation.prompt is not None and generation.prompt.num_tokens == 3
    await many.has_sent("r1")


async def test_what_keeps_requests_from_being_sent_is_told_to_the_reader(many: ScriptedMany) -> None:
    """It would wait for them for ever."""
    many.fails = ValueError("no such id")
    batch = completed(many, 2)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the error itself)
        await asyncio.wait_for(anext(batch), STEP_S)
    assert caught.value is many.fails


async def test_a_stream_that_is_over_is_told_as_such(many: ScriptedMany) -> None:
    """By the reader, which knows why; or by how many requests were running."""
    many.fails = StreamOverError("over")
    batch = completed(many, 2)
    many.items.put_nowait(None)
    with refuses(GenserveError, says="2 requests"):
        await anext(batch)


async def test_a_stream_that_was_closed_has_no_error(many: ScriptedMany) -> None:
    """Whoever closed it knows."""
    batch = completed(many, 2)
    batch.cancel()
    with pytest.raises(StopAsyncIteration):
        await anext(batch)


@pytest.mark.parametrize("error", [EngineDeadError("it has died"), None])
async def test_an_error_of_no_request_is_that_of_the_stream(many: ScriptedMany, error: GenserveError | None) -> None:
    """And so is an answer for a request that is not running."""
    batch = completed(many, 1)
    many.items.put_nowait(ManyItem("r9", None, error))
    with refuses(GenserveError if error is None else type(error), says="'r9'" if error is None else None) as caught:
        await anext(batch)
    assert error is None or caught.value is error
    batch.cancel()
