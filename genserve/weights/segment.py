"""Shared memory of a trainer on the same host, from which its bytes are copied.

A peer names a path, so most of this is about which paths: nothing but memory that was made to be handed over is read.
It is never mapped, because its owner may shorten it at any time, and a page that is gone would be a SIGBUS.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from genserve.errors import ChecksumMismatchError, InvalidFieldError
from genserve.weights.checksum import crc32c_of

NAME_PREFIX = "genserve-push"
MAX_CHUNK_BYTES = 64 << 20
_PATH = re.compile(rf"/dev/shm/{NAME_PREFIX}[^/]*|/proc/[1-9][0-9]*/fd/[0-9]+")
_READ_AT_ONCE_BYTES = 256 << 10  # stays in a core's cache between reading, checking and writing
_NO_DIRECT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class SegmentChunk:
    """A piece of the byte space of a push, at `offset`, that lies at `segment_offset` of the memory at `path`."""

    path: str
    segment_offset: int
    offset: int
    length: int
    crc32c: int | None


def host_id() -> str:
    """Equal for processes that can hand memory over to each other: as `GetServerInfoResponse.host_id` says."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"


class Segment:
    """Memory of another process, open for reading. Its methods may be called in any thread, but not during `close`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> "Segment":
        """Raises InvalidFieldError for "segment.path" when it is anything but memory of this user that was made for a
        push."""
        if _PATH.fullmatch(path) is None or "\0" in path:
            raise _refused(f"must be /proc/PID/fd/FD, or /dev/shm/NAME where NAME begins with {NAME_PREFIX!r}")
        # A link below /proc is a door to the file itself, everywhere else it may lead anywhere.
        follows = path.startswith("/proc/")
        try:
            _check(os.stat(path, follow_symlinks=follows))  # before opening: a device might act on that
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            fd = os.open(path, flags if follows else flags | os.O_NOFOLLOW)
        except OSError as error:
            raise _refused(f"cannot be opened by the daemon: {error.strerror}") from error
        try:
            _check(os.fstat(fd))  # what was opened may be another file than what was looked at
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith((f"/memfd:{NAME_PREFIX}", f"/dev/shm/{NAME_PREFIX}")):
                raise _refused(f"is memory whose name does not begin with {NAME_PREFIX!r}")
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def check(self, chunk: SegmentChunk) -> None:
        """Raises InvalidFieldError when the memory has no such piece, or it is too long."""
        if chunk.length > MAX_CHUNK_BYTES:
            raise InvalidFieldError.of("segment.length", f"must be at most {MAX_CHUNK_BYTES}, is {chunk.length}")
        size_bytes = os.fstat(self._fd).st_size
        if chunk.segment_offset + chunk.length > size_bytes:
            raise InvalidFieldError.of(
                "segment.length",
                f"bytes [{chunk.segment_offset}, {chunk.segment_offset + chunk.length}) lie outside of the "
                f"{size_bytes} bytes of {self.path}",
            )

    def copy(self, chunk: SegmentChunk, fd: int) -> None:
        """Copies a piece to its offset in another file; releases the GIL. Raises ChecksumMismatchError after it has
        been copied, and InvalidFieldError when the memory was shortened meanwhile."""
        if chunk.crc32c is not None or not self._copy_directly(chunk, fd):
            self._copy_checked(chunk, fd)

    def read(self, chunk: SegmentChunk) -> bytearray:
        """The bytes of a piece. Raises as `copy`."""
        data = bytearray(chunk.length)
        self._read_into(memoryview(data), chunk.segment_offset)
        _verify(chunk, crc32c_of(memoryview(data)))
        return data

    def close(self) -> None:
        """Lets go of the memory. Safe to call more than once."""
        if self._fd != -1:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _copy_directly(self, chunk: SegmentChunk, fd: int) -> bool:
        """From page to page, inside the kernel; false where it cannot."""
        done = 0
        while done < chunk.length:
            try:
                num_copied = os.copy_file_range(
                    self._fd, fd, chunk.length - done, chunk.segment_offset + done, chunk.offset + done
                )
            except OSError as error:
                if error.errno in _NO_DIRECT_COPY:
                    return False
                raise
            if num_copied == 0:
                raise _shortened(self.path)
            done += num_copied
        return True

    def _copy_checked(self, chunk: SegmentChunk, fd: int) -> None:
        buffer = memoryview(bytearray(min(_READ_AT_ONCE_BYTES, chunk.length)))
        done = computed = 0
        while done < chunk.length:
            piece = buffer[: min(len(buffer), chunk.length - done)]
            self._read_into(piece, chunk.segment_offset + done)
            if chunk.crc32c is not None:
                computed = crc32c_of(piece, computed)
            written = 0
            while written < len(piece):
                written += os.pwrite(fd, piece[written:], chunk.offset + done + written)
            done += len(piece)
        _verify(chunk, computed)

    def _read_into(self, piece: memoryview, position: int) -> None:
        while piece:
            num_read = os.preadv(self._fd, [piece], position)
            if num_read == 0:
                raise _shortened(self.path)
            piece, position = piece[num_read:], position + num_read


@cache
def _devices() -> frozenset[int]:
    """The file systems of memfds and of /dev/shm."""
    fd = os.memfd_create("genserve-device", os.MFD_CLOEXEC)
    try:
        devices = {os.fstat(fd).st_dev}
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):  # memfds alone, then
        devices.add(os.stat("/dev/shm").st_dev)
    return frozenset(devices)


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_dev not in _devices():
        raise _refused("is no shared memory")
    if found.st_uid != os.geteuid():
        raise _refused("belongs to another user than the daemon's")


def _verify(chunk: SegmentChunk, computed: int) -> None:
    if chunk.crc32c is not None and computed != chunk.crc32c:
        raise ChecksumMismatchError(
            f"the {chunk.length} bytes of shared memory for {chunk.offset} have CRC32C {computed:#010x}, "
            f"{chunk.crc32c:#010x} was sent with them",
            metadata={"offset": str(chunk.offset)},
        )


def _refused(why: str) -> InvalidFieldError:
    return InvalidFieldError.of("segment.path", why)


def _shortened(path: str) -> InvalidFieldError:
    return InvalidFieldError.of("segment.length", f"{path} was shortened while it was read")
