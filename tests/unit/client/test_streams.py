"""Streams that are left, resumed, closed and dropped; batches whose daemon has no room, or whose options are wrong."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from genserve.client import AsyncClient
from genserve.errors import DOMAIN, DeadlineError, GenserveError, InvalidFieldError, QueueFullError
from genserve.transport.streams import EOF, ResponseStream
from genserve.v1 import generation_pb2
from tests.support.patience import STEP_S, slow, turns, until
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse, running_daemon

Item = generation_pb2.GenerateManyItem


def finished(request_id: str) -> Item:
    """A request's whole answer."""
    response = generation_pb2.GenerateResponse(request_id=request_id)
    response.prompt.num_tokens = 1
    response.outputs.add(token_ids=[7])
    response.usage.num_output_tokens = 1
    return Item(request_id=request_id, response=response)


def queue_full(request_id: str, retry_after_s: float) -> Item:
    """A refusal as the daemon's."""
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    delay = Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    for detail in (
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain=DOMAIN),
        error_details_pb2.RetryInfo(retry_delay=delay),
    ):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return Item(request_id=request_id, error=status)


class PairingDaemon(ScriptedDaemon):
    """Answers two requests with one message, and remembers what is aborted, by the stream or by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted_here: list[str] = []
        self.aborted: list[list[str]] = []
        self.ended = asyncio.Event()

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateManyResponse]:
        ids = [(await anext(requests)).generate.request_id for _ in range(2)]
        yield generation_pb2.GenerateManyResponse(items=map(finished, ids))
        async for message in requests:
            self.aborted_here.append(message.abort)
        self.ended.set()
        await asyncio.Event().wait()

    async def Abort(self, request: Any, context: Any) -> generation_pb2.AbortResponse:
        self.aborted.append(list(request.request_ids))
        return generation_pb2.AbortResponse()


class BusyDaemon(ScriptedDaemon):
    """Runs `room` requests at once, each for a moment, and refuses all others."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 1 << 30
        self.retry_after_s = 0.05
        self.running: set[str] = set()
        self.most_running = 0
        self.num_refused = 0
        self.ends_early = False
        self.closed_its_side = asyncio.Event()

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateManyResponse]:
        items: asyncio.Queue[Item | None] = asyncio.Queue()

        async def run(request_id: str) -> None:
            await slow(0.002)
            self.running.discard(request_id)
            items.put_nowait(finished(request_id))

        async def read() -> None:
            async for message in requests:
                self.requests.append(message.generate)
                request_id = message.generate.request_id
                if len(self.running) >= self.room:
                    self.num_refused += 1
                    items.put_nowait(queue_full(request_id, self.retry_after_s))
                    continue
                self.running.add(request_id)
                self.most_running = max(self.most_running, len(self.running))
                runs.append(asyncio.create_task(run(request_id)))
            self.closed_its_side.set()
            await asyncio.gather(*runs)
            items.put_nowait(None)

        if self.ends_early:
            return
        runs: list[asyncio.Task[None]] = []
        reading = asyncio.create_task(read())
        try:
            while (item := await items.get()) is not None:
                yield generation_pb2.GenerateManyResponse(items=[item])
        finally:
            reading.cancel()
            for task in runs:
                task.cancel()


@pytest.fixture
async def busy() -> AsyncIterator[BusyDaemon]:
    async with running_daemon(daemon=BusyDaemon()) as daemon:
        assert isinstance(daemon, BusyDaemon)
        yield daemon


# --- waiting for an item is given up


async def test_a_stream_goes_on_after_an_item_was_not_waited_for(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Every delta comes once, in order, however often waiting times out."""
    daemon.hangs_after = 0
    texts = []
    async with client.stream("x") as deltas:
        for position in range(len(daemon.words)):
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(deltas), 0.01)
            await daemon.hanging.wait()
            daemon.hanging.clear()
            daemon.hangs_after = position + 1
            daemon.goes_on.set()
            texts.append((await anext(deltas)).text)
        with pytest.raises(StopAsyncIteration):
            await anext(deltas)
    assert texts == list(daemon.words)
    assert not daemon.cancelled.is_set()


async def test_a_batch_goes_on_after_an_answer_was_not_waited_for(busy: BusyDaemon) -> None:
    """`generate_as_completed` and `stream_many` as well."""
    async with AsyncClient(busy.target) as client:
        positions = []
        async with client.generate_as_completed(["x"] * 50) as completed:
            while True:
                try:
                    positions.append((await asyncio.wait_for(anext(completed), 0.0005))[0])
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    break
        assert sorted(positions) == list(range(50))
        async with client.stream_many() as many:
            waiting = asyncio.create_task(anext(many))
            await asyncio.sleep(0)
            waiting.cancel()
            submitting = asyncio.create_task(many.submit("x", request_id="a"))
            await asyncio.sleep(0)
            submitting.cancel()
            await many.submit("x", request_id="b")
            await many.done()
            assert sorted([item.request_id async for item in many]) == ["a", "b"]


async def test_two_readers_of_a_stream_share_its_items(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """None is given twice, none is lost."""
    stream = client.stream("x")

    async def read() -> list[str]:
        return [delta.text async for delta in stream]

    one, other = await asyncio.gather(read(), read())
    assert sorted(one + other) == sorted(daemon.words)


async def test_a_stream_that_is_dropped_while_it_is_read_ends_its_call(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """The read that was given up does not keep it alive."""
    daemon.hangs_after = 0
    stream = client.stream("x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.05)
    await asyncio.wait_for(daemon.hanging.wait(), STEP_S)
    del stream
    gc.collect()
    await asyncio.wait_for(daemon.cancelled.wait(), STEP_S)


async def test_a_cancelled_task_ends_the_stream_that_only_its_loop_has(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """At once: the task keeps its error and that the frames, but none of these has the stream."""
    daemon.hangs_after = 0

    async def read() -> None:
        async for _ in client.stream("x"):
            pass

    reading = asyncio.create_task(read())
    await asyncio.wait_for(daemon.hanging.wait(), STEP_S)
    gc.disable()
    try:
        reading.cancel()
        await asyncio.wait({reading})
        await asyncio.wait_for(daemon.cancelled.wait(), STEP_S)
    finally:
        gc.enable()


class FullCall:
    """A call of which more is there to read than a stream reads ahead."""

    def __init__(self) -> None:
        self.num_read = 0
        self.is_cancelled = False

    async def read(self) -> int:
        self.num_read += 1
        return self.num_read if self.num_read < 50 else EOF

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_stream_that_is_dropped_with_much_unread_leaves_no_task() -> None:
    """The one that reads ahead has no place for what it has read, nor for the end."""
    call, before = FullCall(), asyncio.all_tasks()
    stream = ResponseStream(call, str, contextlib.nullcontext)
    its_tasks = asyncio.all_tasks() - before
    await turns()
    assert 0 < call.num_read < 50, "it waits until there is room"
    assert await anext(stream) == "1"
    await turns()
    del stream
    gc.collect()
    await until(lambda: all(task.done() for task in its_tasks))
    assert call.is_cancelled


async def test_closing_a_stream_ends_its_reader(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The reader is at the end; it was not cancelled."""
    daemon.hangs_after = 0
    stream = client.stream("x")
    reading = asyncio.create_task(anext(stream, None))
    await asyncio.wait_for(daemon.hanging.wait(), STEP_S)
    await stream.aclose()
    assert await asyncio.wait_for(reading, STEP_S) is None


async def test_a_batch_that_is_closed_gives_nothing_of_what_has_come() -> None:
    """Neither what was in the same message as the item before, nor what follows."""
    async with (
        running_daemon(daemon=PairingDaemon()) as daemon,
        AsyncClient(daemon.target) as client,
        client.stream_many() as many,
    ):
        for each in ("a", "b"):
            assert await many.submit("x", request_id=each) == each
        assert ((await anext(many)).request_id, many.num_messages) == ("a", 1)
        await many.aclose()
        assert [item async for item in many] == []


async def test_unfinished_request_is_aborted_by_its_stream_or_a_later_call() -> None:
    """What has ended, or was never begun, is not: its id may be another's."""
    async with (
        running_daemon(daemon=PairingDaemon()) as daemon,
        AsyncClient(daemon.target) as client,
        client.stream_many() as many,
    ):
        assert isinstance(daemon, PairingDaemon)
        for each in ("a", "b"):
            await many.submit("x", request_id=each)
        assert (await anext(many)).request_id == "a"
        for each in ("a", "b", "never"):
            await many.abort(each)
        await many.done()
        await asyncio.wait_for(daemon.ended.wait(), STEP_S)
        for each in ("a", "b", "never"):
            await many.abort(each)
        assert (daemon.aborted_here, daemon.aborted) == (["b"], [["b"]])


async def test_an_error_of_a_stream_is_raised_each_time_and_to_each_reader(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """Until it is closed: then it is at its end."""
    daemon.fail = lambda context: refuse(context, code_pb2.ABORTED, "QUEUE_FULL", "full")
    stream = client.stream("x")
    errors = await asyncio.gather(*(anext(stream) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in errors] == [QueueFullError] * 3
    with pytest.raises(QueueFullError):
        await anext(stream)
    stream.cancel()
    assert [delta async for delta in stream] == []


# --- wrong options, failures, a full queue


@pytest.mark.parametrize("options", [{"n": 1 << 40}, {"bad_words": "abc"}, {"temprature": 1.0}])
async def test_a_wrong_option_of_a_batch_is_raised_before_anything_is_sent(
    busy: BusyDaemon, options: dict[str, Any]
) -> None:
    """As itself, also in a TaskGroup, where a cancellation would vanish."""
    async with AsyncClient(busy.target) as client:
        with pytest.raises((InvalidFieldError, TypeError), match=next(iter(options))):  # the option's name
            await client.generate_many(["a", "b"], **options)

        async def in_group() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(client.generate_many(["a", "b"], **options))

        with pytest.raises(ExceptionGroup) as raised:
            await in_group()
        assert isinstance(raised.value.exceptions[0], InvalidFieldError | TypeError)
        with refuses(InvalidFieldError, says="prompts[1]"):
            await client.generate_many(["a", ["b"]])  # type: ignore[list-item]
    assert busy.requests == []


async def test_what_a_full_queue_refuses_is_sent_again_until_all_have_ended(busy: BusyDaemon) -> None:
    """Nothing is lost, and no more is sent than there is room for by and by."""
    busy.room = 5
    async with AsyncClient(busy.target) as client:
        generations = await client.generate_many([[number] for number in range(300)])
    assert [generation.token_ids for generation in generations] == [[7]] * 300
    assert busy.most_running == 5
    assert 0 < busy.num_refused < 300
    assert busy.closed_its_side.is_set()


async def test_a_queue_that_stays_full_ends_the_batch_at_its_deadline(busy: BusyDaemon) -> None:
    """Others hold all the room. It is asked now and then, not all the time."""
    busy.room, busy.retry_after_s = 0, 0.1
    async with AsyncClient(busy.target) as client:
        for timeout_s in (0.3, 3.0, 30.0):  # a busy machine may take longer to bring it there
            with pytest.raises(DeadlineError):
                await client.generate_many(["x"] * 100, timeout_s=timeout_s)
            if busy.num_refused:
                break
    # All may have been sent before the first refusal came; then two at most in each pause.
    assert 0 < busy.num_refused <= 100 + 2 * (1 + timeout_s / busy.retry_after_s)


@pytest.mark.slow
async def test_a_batch_begins_only_so_many_requests_at_once(busy: BusyDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts there are: the daemon's queue is shared with others."""
    monkeypatch.setattr("genserve.client.generation.calls.MAX_IN_FLIGHT", 64)
    async with AsyncClient(busy.target) as client:
        assert len(await client.generate_many(["x"] * 1000)) == 1000
    assert busy.most_running <= 64


async def test_a_daemon_that_ends_the_stream_early_is_an_error(busy: BusyDaemon) -> None:
    """Answers that are missing are not left out silently."""
    busy.ends_early = True
    async with AsyncClient(busy.target) as client:
        with pytest.raises(GenserveError):
            await client.generate_many(["x"] * 3)
