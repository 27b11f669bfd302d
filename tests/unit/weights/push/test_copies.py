"""The queue of pieces that a thread copies: how many wait, what a failure does to those behind it, and the end."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from genserve.errors import ChecksumMismatchError, InvalidFieldError, PushNotFoundError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.segment import Segment, SegmentChunk
from genserve.weights.push.copies import CopyQueue
from genserve.weights.push.stream import PushStream
from tests.support.patience import STEP_S, turns, until
from tests.support.refusals import refuses
from tests.unit.weights.conftest import Rig, header, weights
from tests.unit.weights.push.handed_over import Copying, memory, path

MAX_AHEAD = 8
"""Pieces that are being copied or wait for it: a fast sender must not fill the daemon's memory with them."""


@pytest.fixture
def segment() -> Iterator[Segment]:
    with memory(weights(1)) as fd:
        segment = Segment(path(fd), os.dup(fd))
        yield segment
        segment.close()


@pytest.fixture
async def stream(rig: Rig) -> AsyncIterator[PushStream]:
    stream = await rig.registry.open(header(attempt="a"))
    yield stream
    stream.detach()


@pytest.fixture
async def queue(segment: Segment, copying: Copying) -> AsyncIterator[CopyQueue]:
    queue = CopyQueue()
    yield queue
    copying.let_go.release(100)
    await queue.close()


def put(
    queue: CopyQueue,
    stream: PushStream,
    segment: Segment,
    offset: int,
    pipe: AckPipe | None = None,
    crc32c: int | None = None,
) -> None:
    """Two bytes."""
    claim = stream.claim(offset, 2)
    assert claim is not None
    queue.put(stream, claim, SegmentChunk(segment.path, offset, offset, 2, crc32c), segment, pipe)


async def done(waiting: "asyncio.Task[None]") -> bool:
    """Whether it has ended, once whatever is ready has run."""
    await turns()
    return waiting.done()


async def test_one_more_piece_may_be_put_once_fewer_than_eight_are_on_their_way(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying
) -> None:
    """And nothing is waited for before that. Empty means that none is."""
    for offset in range(0, 2 * (MAX_AHEAD - 1), 2):
        put(queue, stream, segment, offset)
        await asyncio.wait_for(queue.wait_room(), STEP_S)
    put(queue, stream, segment, 2 * MAX_AHEAD)
    room, empty = asyncio.create_task(queue.wait_room()), asyncio.create_task(queue.wait_empty())
    assert not await done(room)
    copying.let_go.release()
    await asyncio.wait_for(room, STEP_S)
    assert not await done(empty)
    copying.let_go.release(MAX_AHEAD - 1)
    await asyncio.wait_for(empty, STEP_S)
    assert len(copying.begun) == MAX_AHEAD
    assert not stream.claims


async def test_nothing_is_copied_behind_a_piece_that_failed(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying, rig: Rig
) -> None:
    """Those that are queued are acknowledged all the same, hold no place, and do not count; the error is told once."""
    reading, writing = os.pipe()
    pipe = AckPipe(path(writing), writing)
    put(queue, stream, segment, 0, pipe)
    put(queue, stream, segment, 2, pipe, crc32c=1)
    put(queue, stream, segment, 4, pipe)
    put(queue, stream, segment, 6, pipe)
    copying.let_go.release(100)
    with pytest.raises(ChecksumMismatchError):
        await asyncio.wait_for(queue.wait_empty(), STEP_S)
    await queue.wait_empty()
    assert copying.begun == [0, 2]
    assert rig.registry.report("p1").push.missing == ((2, 32),)
    assert not stream.claims
    assert os.read(reading, 100) == bytes(4)
    os.close(reading)
    pipe.close()


async def test_the_first_of_two_errors_is_told(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying, rig: Rig
) -> None:
    """The one of the piece; what became of the push afterwards is told by whoever asks next."""
    put(queue, stream, segment, 0, crc32c=1)
    put(queue, stream, segment, 2)
    rig.registry.discard("p1", force=True)
    copying.let_go.release(100)
    with pytest.raises(ChecksumMismatchError):
        await asyncio.wait_for(queue.wait_empty(), STEP_S)
    await queue.wait_empty()


async def test_a_push_that_is_gone_meanwhile_is_told(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying, rig: Rig
) -> None:
    """Its memory stays until the thread has written there."""
    put(queue, stream, segment, 0)
    rig.registry.discard("p1", force=True)
    copying.let_go.release(100)
    with pytest.raises(PushNotFoundError):
        await asyncio.wait_for(queue.wait_empty(), STEP_S)


async def test_the_error_does_not_hold_the_memory_of_the_push(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying
) -> None:
    """Its frames would, for as long as somebody keeps it: only those of whoever is told are in it."""
    put(queue, stream, segment, 0, crc32c=1)
    copying.let_go.release(100)
    with pytest.raises(ChecksumMismatchError) as caught:
        await asyncio.wait_for(queue.wait_empty(), STEP_S)
    assert "_copy" not in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("num_waiting", [0, 1])
async def test_what_was_not_begun_when_a_stream_ends_is_not_copied(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying, rig: Rig, num_waiting: int
) -> None:
    """The piece that is being copied is; its memory may be closed afterwards, and no place is held."""
    put(queue, stream, segment, 0)
    await until(lambda: copying.begun)
    for number in range(num_waiting):
        put(queue, stream, segment, 2 + 2 * number)
    queue.cancel()
    closing = asyncio.create_task(queue.close())
    assert not await done(closing)
    copying.let_go.release(100)
    await asyncio.wait_for(closing, STEP_S)
    assert copying.begun == [0]
    assert rig.registry.report("p1").push.missing == ((2, 32),)
    assert not stream.claims
    await queue.wait_empty()


async def test_a_thread_goes_with_its_queue(stream: PushStream, segment: Segment, copying: Copying) -> None:
    """A daemon that serves thousands of streams has not thousands of threads."""
    before, queue = set(threading.enumerate()), CopyQueue()
    put(queue, stream, segment, 0)
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name.startswith("segments"))
    copying.let_go.release()
    await queue.close()
    await asyncio.to_thread(thread.join, STEP_S)
    assert not thread.is_alive()


async def test_a_pipe_that_nobody_reads_ends_the_stream(
    queue: CopyQueue, stream: PushStream, segment: Segment, copying: Copying
) -> None:
    """The bytes of that piece do not count: its owner cannot know of them."""
    reading, writing = os.pipe()
    os.close(reading)
    pipe = AckPipe(path(writing), writing)
    put(queue, stream, segment, 0, pipe)
    copying.let_go.release(100)
    with refuses(InvalidFieldError, field="segment.taken_path"):
        await asyncio.wait_for(queue.wait_empty(), STEP_S)
    pipe.close()
