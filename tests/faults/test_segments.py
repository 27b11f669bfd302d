"""Shared memory that a trainer on the daemon's host hands over, honestly and not."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

import grpc.aio
import pytest

from genserve.errors import InvalidFieldError
from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support.answers import answer_of
from tests.support.raw_push import RawPush
from tests.support.subject import Subject

Frame = weights_pb2.PushWeightsRequest
PIECE_BYTES = 50_000


async def test_memory_is_as_good_as_bytes(subject: Subject) -> None:
    """The control of those below, and again with the memory of the push before."""
    for name in ("b", "a", "b"):
        result = await subject.push(name, shared_memory=True, streams=2)
        await subject.oracle.holds((result.state.weight_version, name))


@contextmanager
def memory(raw: RawPush, name: str = "genserve-push") -> Iterator[int]:
    """The bytes of a push in memory."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, raw.data)
        yield fd
    finally:
        os.close(fd)


def of_another_name(raw: RawPush, fd: int) -> str:
    """Memory that was not made for a push."""
    os.ftruncate(fd, 0)
    return "/dev/shm/../../etc/passwd"


def truncated(raw: RawPush, fd: int) -> str:
    """Shorter than the header says."""
    os.ftruncate(fd, len(raw.data) - 1)
    return f"/proc/{os.getpid()}/fd/{fd}"


def a_file(raw: RawPush, fd: int) -> str:
    """What everybody may read."""
    return "/etc/passwd"


def closed(raw: RawPush, fd: int) -> str:
    """A descriptor that is not there."""
    return f"/proc/{os.getpid()}/fd/{fd + 1000}"


HOSTILE: list[Callable[[RawPush, int], str]] = [of_another_name, truncated, a_file, closed]


async def test_memory_that_is_none_applies_nothing(subject: Subject) -> None:
    """INVALID_FIELD, and the version before is served."""
    async with subject.unharmed(before="commit"):
        for hostile in HOSTILE:
            raw = await subject.raw_push()
            with memory(raw) as fd:
                piece = weights_pb2.PushSegment(path=hostile(raw, fd), length=len(raw.data))
                with pytest.raises(InvalidFieldError) as refused:
                    await raw.send([*raw.frames(), Frame(segment=piece)])
            assert refused.value.violations[0].field.startswith("segment."), hostile.__name__
            await subject.discard()


async def test_memory_of_each_piece_is_read_anew(subject: Subject) -> None:
    """One memfd for each piece, closed when the piece has been taken: it gets the number of the one before."""
    raw = await subject.raw_push()
    paths: set[str] = set()

    async def frames(taken: int, taken_path: str) -> AsyncIterator[Frame]:
        yield raw.frames()[0]
        for start in range(0, len(raw.data), PIECE_BYTES):
            data = raw.data[start : start + PIECE_BYTES]
            fd = os.memfd_create("genserve-push")
            os.write(fd, data)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            paths.add(path)
            yield Frame(
                segment=weights_pb2.PushSegment(path=path, offset=start, length=len(data), taken_path=taken_path)
            )
            await asyncio.wait_for(asyncio.to_thread(os.read, taken, 1), 60)
            os.close(fd)
        yield Frame(end=weights_pb2.PushEnd())

    reading, writing = os.pipe()
    async with grpc.aio.insecure_channel(subject.process.address) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        await answer_of(stub.PushWeights(frames(reading, f"/proc/{os.getpid()}/fd/{writing}"), timeout=60))
    os.close(reading)
    os.close(writing)
    assert len(paths) < len(raw.data) // PIECE_BYTES, "no number came again: nothing is proven"
    await subject.oracle.holds((raw.header.weight_version, "b"))
    await subject.push("a")  # the tests of this file begin with it


async def test_what_the_daemon_has_open_is_neither_read_nor_told(subject: Subject) -> None:
    """While a trainer hands memory over the daemon has it open, and beside it the pipes on which vLLM waits for its
    processes to end: one byte in them ends the engine."""
    raw = await subject.raw_push()
    raw.header.attempt = "one"  # of which every stream here is: what the good one brings stays when the others end
    with memory(raw) as fd:
        own = Frame(segment=weights_pb2.PushSegment(path=f"/proc/{os.getpid()}/fd/{fd}", length=1000))
        tried = asyncio.Event()

        async def trainer() -> AsyncIterator[Frame]:
            yield raw.frames()[0]
            yield own
            await tried.wait()

        async with grpc.aio.insecure_channel(subject.process.address) as channel, asyncio.TaskGroup() as group:
            call = weights_pb2_grpc.WeightServiceStub(channel).PushWeights(trainer(), timeout=60)
            await subject.until_push(raw.header.push_id, received_bytes=1000)
            memories, pipes = open_in(subject.pid)
            assert len(memories) == 1
            assert len(pipes) > 2
            for taken_path in ("", *pipes):
                piece = weights_pb2.PushSegment(
                    path=memories[0], segment_offset=1000, offset=1000, length=1000, taken_path=taken_path
                )
                with pytest.raises(InvalidFieldError, match="own processes"):
                    await raw.send([*raw.frames(), Frame(segment=piece)], end=False)
            tried.set()
            group.create_task(ended(call))
    assert await subject.is_serving()
    assert (await subject.client.get_push(raw.header.push_id)).push.received_bytes == 1000
    await subject.client.discard_push(raw.header.push_id)
    del subject.oracle.committed[raw.header.weight_version]
    await subject.oracle.holds((await subject.oracle.served_version(), "a"))


def open_in(pid: int) -> tuple[list[str], list[str]]:
    """Paths of the memories of trainers, and of the pipes, that a process has open."""
    found: dict[str, str] = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found[f"/proc/{pid}/fd/{number}"] = os.readlink(f"/proc/{pid}/fd/{number}")
    memories = [path for path, name in found.items() if name.startswith("/memfd:genserve-push")]
    return memories, [path for path, name in found.items() if name.startswith("pipe:")]


async def ended(call: "grpc.aio.StreamUnaryCall[Frame, weights_pb2.PushWeightsResponse]") -> None:
    """The stream ends, and not well: it has no end frame."""
    with pytest.raises(grpc.aio.AioRpcError):
        await call
