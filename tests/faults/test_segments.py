"""Shared memory that a trainer on the daemon's host hands over, honestly and not."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from genserve.errors import InvalidFieldError
from genserve.v1 import weights_pb2
from tests.engine.test_push import RawPush
from tests.faults.subject import Subject

Frame = weights_pb2.PushWeightsRequest


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


@pytest.mark.parametrize("hostile", [of_another_name, truncated, a_file, closed])
async def test_memory_that_is_none_applies_nothing(subject: Subject, hostile: Callable[[RawPush, int], str]) -> None:
    """INVALID_FIELD, and the version before is served."""
    raw = await subject.raw_push()
    with memory(raw) as fd:
        piece = weights_pb2.PushSegment(path=hostile(raw, fd), length=len(raw.data))
        async with subject.refuses(InvalidFieldError) as refused:
            await raw.send([*raw.frames(), Frame(segment=piece)])
        assert refused.value.violations[0].field.startswith("segment.")
