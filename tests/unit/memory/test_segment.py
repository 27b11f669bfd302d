"""Memory of another process, read without trusting it."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest

from genserve.errors import ChecksumMismatchError, InvalidFieldError
from genserve.memory.segment import Segment, SegmentChunk
from tests.support.refusals import refuses

DATA = bytes(range(256)) * 4096  # more than is read at once


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory with DATA in it."""
    fd = os.memfd_create("genserve-push-unit")
    os.write(fd, DATA)
    yield fd
    os.close(fd)


@pytest.fixture
def segment(memory: int) -> Iterator[Segment]:
    """The memory, as the daemon has it open."""
    opened = Segment.open(f"/proc/{os.getpid()}/fd/{memory}", None)
    yield opened
    opened.close()


def piece(segment: Segment, **fields: Any) -> SegmentChunk:
    """300,000 bytes at 5."""
    return replace(SegmentChunk(segment.path, 5, 7, 300_000, None), **fields)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
@pytest.mark.parametrize("checked", [True, False])
def test_a_piece_is_copied(seals: int, checked: bool) -> None:
    """Read, and in place where the memory keeps its size; memory that only cannot shrink may have grown meanwhile."""
    fd = os.memfd_create("genserve-push-unit", os.MFD_ALLOW_SEALING)
    os.write(fd, DATA)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    opened = Segment.open(f"/proc/{os.getpid()}/fd/{fd}", None)
    if not seals & fcntl.F_SEAL_GROW:
        os.ftruncate(fd, len(DATA) + 10)
    start = len(DATA) - 300_000 + (0 if seals & fcntl.F_SEAL_GROW else 10)
    expected = (DATA + bytes(10))[start : start + 300_000]
    crc32c = google_crc32c.value(expected) if checked else None
    target = bytearray(300_002)
    opened.copy(piece(opened, segment_offset=start, crc32c=crc32c), memoryview(target)[1:-1])
    assert target == b"\0" + expected + b"\0"
    assert opened.read(piece(opened, segment_offset=start, crc32c=crc32c)) == expected
    with pytest.raises(ChecksumMismatchError):
        opened.read(piece(opened, crc32c=1))
    opened.close()
    os.close(fd)


@pytest.mark.parametrize("crc32c", [None, 1])
def test_memory_that_was_shortened_is_an_error(segment: Segment, memory: int, crc32c: int | None) -> None:
    """After it was found to be long enough."""
    chunk = piece(segment, crc32c=crc32c)
    segment.check(chunk)
    os.ftruncate(memory, 1000)
    with refuses(InvalidFieldError, field="segment.length"):
        segment.copy(chunk, memoryview(bytearray(chunk.length)))
    with pytest.raises(InvalidFieldError):
        segment.check(chunk)


def test_nothing_stays_open_after_a_refusal(tmp_path: Any) -> None:
    """Nor after it was closed twice."""
    before = set(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("of another name")
    with refuses(InvalidFieldError, field="segment.path"):
        Segment.open(f"/proc/{os.getpid()}/fd/{fd}", None)
    os.close(fd)
    assert set(os.listdir("/proc/self/fd")) <= before  # what other tests have left may be closed meanwhile
