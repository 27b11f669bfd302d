"""Memory that a stream hands over, on its way into a push."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import google_crc32c
import pytest

from genserve.errors import ChecksumMismatchError, InvalidFieldError, PushNotFoundError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.daemon_processes import DaemonProcesses, file_id
from genserve.memory.segment import Segment, SegmentChunk
from genserve.weights.push.segments import CopyQueue, OwnRing, SegmentReader
from genserve.weights.push.staging import Claim
from genserve.weights.push.stream import PushStream
from tests.support.idle_process import idle_process
from tests.support.patience import STEP_S, turns, until
from tests.support.refusals import refuses
from tests.unit.weights.conftest import Rig, header, nothing_runs, tensors, weights
from tests.unit.weights.push.handed_over import Copying, memory, path, pipe


def num_open(fd: int) -> int:
    """How many descriptors of this process are of the same file."""
    wanted, found = file_id(os.fstat(fd)), 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found += file_id(os.stat(f"/proc/self/fd/{number}")) == wanted
    return found


async def test_a_stream_has_one_memory_and_one_pipe_open(rig: Rig) -> None:
    """The one that it named last: a trainer that makes memory anew for each tensor does not use up the daemon's
    descriptors. None when it has ended."""
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    with memory(weights(1)[:16]) as first, memory(weights(1)[16:]) as second, pipe() as one, pipe() as other:
        files = (first, second, one, other)
        ours = [num_open(fd) for fd in files]

        def daemons() -> list[int]:
            return [num_open(fd) - own for fd, own in zip(files, ours, strict=True)]

        await reader.take(stream, SegmentChunk(path(first), 0, 0, 16, None, path(one)))
        assert daemons() == [1, 0, 1, 0]
        await reader.take(stream, SegmentChunk(path(second), 0, 16, 16, None, path(other)))
        assert daemons() == [0, 1, 0, 1]
        await reader.finish()
        await reader.close()
        assert daemons() == [0, 0, 0, 0]
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)


@pytest.mark.parametrize("is_checked", [True, False])
async def test_checksum_of_shared_memory_is_reported_as_verify(rig: Rig, is_checked: bool) -> None:
    """As that of chunks; a sender may leave it out."""
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    with memory(weights(1)) as fd:
        crc32c = google_crc32c.value(weights(1)) if is_checked else None
        await reader.take(stream, SegmentChunk(path(fd), 0, 0, 32, crc32c))
        await reader.finish()
    await reader.close()
    applied = (await stream.finish()).applied
    stream.detach()
    assert applied is not None and (applied.step_s["verify"] > 0) is is_checked


async def test_a_piece_that_no_thread_can_copy_holds_no_place(rig: Rig) -> None:
    """Here the reader has let go of its thread; a machine may have none left. Others can send those bytes."""
    fd = os.memfd_create("genserve-push-unit")
    os.write(fd, weights(1))
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    await reader.take(stream, SegmentChunk(path(fd), 0, 0, 1, None))
    await reader.close()
    with pytest.raises(RuntimeError):
        await reader.take(stream, SegmentChunk(path(fd), 1, 1, 31, None))
    assert not stream.claims
    stream.write(0, weights(1), None)
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)
    await reader.close()
    os.close(fd)


async def test_what_is_refused_closes_what_was_named_before_and_no_more(rig: Rig) -> None:
    """Memory that is named again is opened again, and nothing is closed twice: the number may be another file's."""
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    with memory(weights(1)) as fd, pipe() as ack:
        ours = [num_open(fd), num_open(ack)]
        await reader.take(stream, SegmentChunk(path(fd), 0, 0, 16, None, path(ack)))
        with pytest.raises(InvalidFieldError):
            await reader.take(stream, SegmentChunk("/etc/passwd", 16, 16, 8, None, path(ack)))
        await reader.take(stream, SegmentChunk(path(fd), 16, 16, 8, None, path(ack)))
        with pytest.raises(InvalidFieldError):
            await reader.take(stream, SegmentChunk(path(fd), 24, 24, 8, None, path(fd)))
        assert [num_open(fd) - ours[0], num_open(ack) - ours[1]] == [1, 0]
        for _ in range(2):
            await reader.close()
        assert [num_open(fd), num_open(ack)] == ours
    assert rig.registry.report("p1").push.missing == ((24, 32),)
    stream.detach()


async def test_a_process_of_the_daemon_hands_over_its_own_ring_alone(rig: Rig) -> None:
    """Its clients may be anywhere, and name what they like."""
    stream = await rig.registry.open(header())
    with memory(weights(1)) as own, memory(weights(2)) as other, pipe() as ack, pipe() as foreign:
        reader = SegmentReader(DaemonProcesses(), OwnRing(path(own), path(ack)))
        for named, acknowledged, field_path in (
            (other, ack, "segment"),
            (own, foreign, "segment.taken_path"),
            (own, None, "segment.taken_path"),
        ):
            taken_path = "" if acknowledged is None else path(acknowledged)
            with refuses(InvalidFieldError, field=field_path):
                await reader.take(stream, SegmentChunk(path(named), 0, 0, 32, None, taken_path))
        await reader.take(stream, SegmentChunk(path(own), 0, 0, 32, None, path(ack)))
        await reader.finish()
        await reader.close()
        with refuses(InvalidFieldError, field="segment.path"):
            await SegmentReader(DaemonProcesses()).take(stream, SegmentChunk(path(own), 0, 0, 32, None))
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)


@dataclass
class Sender:
    """A stream and its reader, with memory and pipes to name."""

    stream: PushStream
    reader: SegmentReader
    copying: Copying
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def takes(self, fd: int, start: int, ack: int) -> "asyncio.Task[None]":
        """Hands over two bytes; what can be done before a piece is copied is done."""
        chunk = SegmentChunk(path(fd), start, start, 2, None, path(ack))
        task = asyncio.create_task(self.reader.take(self.stream, chunk))
        await nothing_runs()
        return task


@pytest.fixture
async def sender(rig: Rig, copying: Copying) -> AsyncIterator[Sender]:
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    yield Sender(stream, reader, copying)
    copying.let_go.release(100)
    await reader.close()
    stream.detach()


async def test_a_piece_is_taken_while_another_one_is_copied(sender: Sender) -> None:
    """Of the same memory, with the same pipe: eight of them, so that the sender and the copy do not wait for each
    other. The ninth waits for the first."""
    with memory(weights(1)) as fd, pipe() as ack:
        tasks = [await sender.takes(fd, 2 * number, ack) for number in range(8)]
        assert all(task.done() for task in tasks)
        ninth = await sender.takes(fd, 16, ack)
        assert not ninth.done()
        sender.copying.let_go.release()
        await asyncio.wait_for(ninth, STEP_S)
        sender.copying.let_go.release(100)
        await sender.reader.finish()


@pytest.mark.parametrize("changes", ["memory", "pipe"])
async def test_what_is_being_copied_keeps_its_memory_and_its_pipe(sender: Sender, changes: str) -> None:
    """Another one is opened once nobody uses them."""
    with memory(weights(1)) as fd, memory(weights(1)) as other, pipe() as ack, pipe() as another:
        await sender.takes(fd, 0, ack)
        following = await sender.takes(*((other, 2, ack) if changes == "memory" else (fd, 2, another)))
        assert not following.done()
        sender.copying.let_go.release(100)
        await asyncio.wait_for(following, STEP_S)
        await sender.reader.finish()
    assert not sender.stream.claims


async def test_the_end_of_a_stream_waits_for_one_copy_and_begins_no_other(sender: Sender, rig: Rig) -> None:
    """Also where whoever ends it is cancelled: descriptors are closed when nobody uses them."""
    with memory(weights(1)) as fd, pipe() as ack:
        ours = num_open(fd)
        await sender.takes(fd, 0, ack)
        await sender.takes(fd, 2, ack)
        await until(lambda: sender.copying.begun)
        closing = asyncio.create_task(sender.reader.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert num_open(fd) == ours + 1
        sender.copying.let_go.release(100)
        await until(lambda: num_open(fd) <= ours)
    assert sender.copying.begun == [0]
    assert rig.registry.report("p1").push.missing == ((2, 32),)


class Comparing:
    """A stream that has its bytes, and notes what is compared. `busy`: places that somebody writes."""

    push_id = "p1"
    claims = ()
    gone = asyncio.Event()

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []
        self.turns: list[int] = []
        self.turn = 0
        self.busy: set[int] = set()

    def is_claimed(self, offset: int, length: int) -> bool:
        return any(offset <= place < offset + length for place in self.busy)

    async def wait_unclaimed(self, offset: int, length: int) -> None:
        if self.is_claimed(offset, length):
            self.busy.clear()

    def claim(self, offset: int, length: int) -> Claim | None:
        return None

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        assert not self.is_claimed(offset, len(data))
        assert crc32c is None
        self.written.append((offset, len(data)))
        self.turns.append(self.turn)
        self.busy = {offset + len(data)} - {3 << 20}

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


async def test_present_bytes_are_compared_in_pieces_with_turns_for_others() -> None:
    """A MiB each, as a chunk has: token streams must not wait for a large segment. Each piece waits for who writes
    there."""
    stream, size_bytes = Comparing(), (5 << 19)
    counting = asyncio.create_task(stream.count())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    with memory(bytes(size_bytes)) as fd:
        await reader.take(stream, SegmentChunk(path(fd), 0, 7, size_bytes, None))  # type: ignore[arg-type]
        await reader.close()
    counting.cancel()
    mib = 1 << 20
    assert stream.written == [(7, mib), (7 + mib, mib), (7 + 2 * mib, mib // 2)]
    assert len(set(stream.turns)) == 3


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


async def test_the_first_of_two_errors_is_reported(
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


async def test_a_push_that_is_gone_meanwhile_is_reported(
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
    told = caught.traceback[1:]  # the first is of this test
    assert told and not any(isinstance(each, Segment) for entry in told for each in entry.frame.f_locals.values())


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
