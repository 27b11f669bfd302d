"""Memory of another process, read without trusting it."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest

from genserve.errors import ChecksumMismatchError, InvalidFieldError
from genserve.weights.checksum import crc32c_of
from genserve.weights.segment import Segment, SegmentChunk, host_id

DATA = bytes(range(256)) * 4096  # more than is read at once


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory with DATA in it."""
    fd = os.memfd_create("genserve-push-unit")
    os.write(fd, DATA)
    yield fd
    os.close(fd)


@pytest.fixture
def target() -> Iterator[int]:
    """Where it is copied to."""
    fd = os.memfd_create("target")
    yield fd
    os.close(fd)


@pytest.fixture
def segment(memory: int) -> Iterator[Segment]:
    """The memory, as the daemon has it open."""
    opened = Segment.open(f"/proc/{os.getpid()}/fd/{memory}")
    yield opened
    opened.close()


def piece(segment: Segment, **fields: Any) -> SegmentChunk:
    """300,000 bytes at 5."""
    return replace(SegmentChunk(segment.path, 5, 7, 300_000, None), **fields)


def unsupported(*_: object) -> int:
    """copy_file_range where the kernel has none."""
    raise OSError(errno.EXDEV, "not here")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_a_piece_is_copied_to_its_place(
    segment: Segment, target: int, direct: bool, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel where it can, through a buffer where it cannot or the bytes are to be checked."""
    if not direct:
        monkeypatch.setattr(os, "copy_file_range", unsupported)
    crc32c = google_crc32c.value(DATA[5:300_005]) if checked else None
    segment.copy(piece(segment, crc32c=crc32c), target)
    assert os.pread(target, 1 << 20, 0) == bytes(7) + DATA[5:300_005]


@pytest.mark.parametrize("crc32c", [None, 1])
def test_memory_that_was_shortened_is_an_error(segment: Segment, memory: int, target: int, crc32c: int | None) -> None:
    """After it was found to be long enough."""
    chunk = piece(segment, crc32c=crc32c)
    segment.check(chunk)
    os.ftruncate(memory, 1000)
    for read in (lambda: segment.copy(chunk, target), lambda: segment.read(chunk)):
        with pytest.raises(InvalidFieldError, match="shortened"):
            read()
    with pytest.raises(InvalidFieldError, match="lie outside"):
        segment.check(chunk)


def test_a_checksum_is_compared(segment: Segment, target: int) -> None:
    """Of what was read, which is what was written."""
    for read in (
        lambda: segment.copy(piece(segment, crc32c=1), target),
        lambda: segment.read(piece(segment, crc32c=1)),
    ):
        with pytest.raises(ChecksumMismatchError):
            read()


def test_nothing_stays_open_after_a_refusal(tmp_path: Any) -> None:
    """Nor after it was closed twice."""
    before = os.listdir("/proc/self/fd")
    fd = os.memfd_create("of another name")
    with pytest.raises(InvalidFieldError, match="does not begin"):
        Segment.open(f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)
    assert os.listdir("/proc/self/fd") == before


def test_checksums_of_views_are_those_of_bytes() -> None:
    """Also continued."""
    assert crc32c_of(memoryview(DATA)[3:]) == google_crc32c.value(DATA[3:])
    assert crc32c_of(memoryview(bytearray(DATA))[10:], crc32c_of(DATA[:10])) == google_crc32c.value(DATA)


def test_a_client_finds_the_same_host_id() -> None:
    """Each has it written down for itself, as a client imports nothing of the daemon's."""
    from genserve.client.shared_memory import own_host_id

    assert host_id() == own_host_id() != ""
