"""What a stream hands over: memory with the bytes of a push, and a pipe for acknowledgements."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from genserve.memory.segment import Segment, SegmentChunk
from tests.support.patience import STEP_S


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


class Copying:
    """Copies that last until the test lets them go; the places in the byte space of those that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Semaphore(0)
        self.begun: list[int] = []
        self._copy = Segment.copy
        monkeypatch.setattr(Segment, "copy", lambda segment, chunk, target: self._held(segment, chunk, target))

    def _held(self, segment: Segment, chunk: SegmentChunk, target: memoryview) -> float:
        self.begun.append(chunk.offset)
        self.let_go.acquire(timeout=STEP_S)
        return self._copy(segment, chunk, target)
