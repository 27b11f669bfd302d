"""Memory that a stream hands over, on its way into a push."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from genserve.errors import InvalidFieldError
from genserve.memory.daemon_processes import DaemonProcesses, file_id
from genserve.memory.segment import SegmentChunk
from genserve.weights.push.segments import OwnRing, SegmentReader
from genserve.weights.push.staging import Claim
from genserve.weights.push.stream import PushStream
from tests.support.idle_process import idle_process
from tests.support.patience import STEP_S, until
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


async def test_a_piece_that_no_thread_can_copy_holds_no_place(rig: Rig) -> None:
    """Here the reader has let go of its thread; a machine may have none left. Others can send those bytes."""
    fd = os.memfd_create("genserve-push-unit")
    os.write(fd, weights(1))
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    await reader.close()
    with pytest.raises(RuntimeError):
        await reader.take(stream, SegmentChunk(path(fd), 0, 0, 32, None))
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


async def test_what_is_there_is_compared_in_pieces_between_which_others_have_their_turn() -> None:
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
