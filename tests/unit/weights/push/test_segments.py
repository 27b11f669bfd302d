"""Memory that a stream hands over, on its way into a push."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from genserve.memory.daemon_processes import DaemonProcesses, file_id
from genserve.memory.segment import SegmentChunk
from genserve.weights.push.segments import SegmentReader
from tests.support.idle_process import idle_process
from tests.unit.weights.conftest import Rig, header, tensors, weights


@contextmanager
def memory(data: bytes) -> Iterator[int]:
    """A trainer's, with these bytes."""
    fd = os.memfd_create("genserve-push-unit")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def pipe() -> Iterator[int]:
    """The writing end of one; the other is open as well."""
    reading, writing = os.pipe()
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def path(fd: int) -> str:
    """Of a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


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
    assert not stream.is_claimed(0, 32)
    stream.write(0, weights(1), None)
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)
    await reader.close()
    os.close(fd)
