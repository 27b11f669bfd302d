"""Shared memory of a trainer on the same host, from which the daemon copies bytes.

A client names the path, so most of this module checks paths: the daemon reads only memory that was made for a push, and
not memory that it has open for another client. Memory with a sealed size is mapped, which makes reading twice as fast;
otherwise a page that is gone would be a SIGBUS.
"""

import fcntl
import mmap
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from genserve.errors import ChecksumMismatchError, InvalidFieldError
from genserve.memory.daemon_processes import DaemonProcesses, file_id
from genserve.memory.ring import NAME_PREFIX
from genserve.tensors.checksum import crc32c_of

MAX_CHUNK_BYTES = 64 << 20
_PATH = re.compile(rf"/dev/shm/{NAME_PREFIX}[^/]*|/proc/([1-9][0-9]{{0,9}})/fd/[0-9]{{1,9}}")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CHECKED_AT_ONCE_BYTES = 256 << 10  # stays in a core's cache between reading and checking


@dataclass(frozen=True, slots=True)
class SegmentChunk:
    """A piece of the byte space of a push, at `offset`, which is at `segment_offset` of the memory at `path`."""

    path: str
    segment_offset: int
    offset: int
    length: int
    crc32c: int | None
    ack_path: str = ""
    """The pipe on which the copy of the piece is acknowledged; "" = nobody wants to know. `taken_path` on the wire."""


class Segment:
    """Memory of another process, open for reading. Any thread may call its methods, but not during `close`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._file_id = file_id(os.fstat(fd))
        self._mapped = _map(fd)

    @classmethod
    def open(cls, path: str, daemon: DaemonProcesses | None) -> "Segment":
        """Opens the memory.

        Raises InvalidFieldError for "segment.path" unless it is memory of this user that was made for a push, and if a
        process of the `daemon` has it open; `daemon` None allows the latter, for a client that is one of them.
        """
        matched = _PATH.fullmatch(path)
        if matched is None or "\0" in path:
            raise _refused(f"must be /proc/PID/fd/FD, or /dev/shm/NAME where NAME begins with {NAME_PREFIX!r}")
        try:
            if daemon is not None and matched[1] is not None and daemon.include(int(matched[1])):
                raise _refused("belongs to one of the daemon's own processes")
            _check(_stat(path))  # checked before opening: a device might act on an open
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            fd = os.open(path, flags if _is_descriptor(path) else flags | os.O_NOFOLLOW)
        except OSError as error:
            raise _refused(f"cannot be opened by the daemon: {error.strerror}") from error
        try:
            _check(os.fstat(fd))  # the opened file may be another one than the checked one
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith((f"/memfd:{NAME_PREFIX}", f"/dev/shm/{NAME_PREFIX}")):
                raise _refused(f"is memory whose name does not begin with {NAME_PREFIX!r}")
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def is_at(self, path: str) -> bool:
        """Whether the path still names this memory: a client that closes a descriptor gets its number again for the
        next one."""
        try:
            return self.path == path and file_id(_stat(path)) == self._file_id
        except OSError:
            return False  # opening it raises the reason

    def check(self, chunk: SegmentChunk) -> None:
        """Raises InvalidFieldError if the memory has no such piece, or the piece is too long."""
        if chunk.length > MAX_CHUNK_BYTES:
            raise InvalidFieldError.of("segment.length", f"must be at most {MAX_CHUNK_BYTES}, is {chunk.length}")
        size_bytes = os.fstat(self._fd).st_size
        if chunk.segment_offset + chunk.length > size_bytes:
            raise InvalidFieldError.of(
                "segment.length",
                f"bytes [{chunk.segment_offset}, {chunk.segment_offset + chunk.length}) lie outside of the "
                f"{size_bytes} bytes of {self.path}",
            )

    def copy(self, chunk: SegmentChunk, target: memoryview) -> float:
        """Copies a piece and returns the seconds that its checksum took; releases the GIL. `target` has the length of
        the piece. Raises ChecksumMismatchError after the copy, and InvalidFieldError if the memory was shortened
        meanwhile."""
        step = len(target) if chunk.crc32c is None else _CHECKED_AT_ONCE_BYTES
        computed, verify_s = 0, 0.0
        for start in range(0, len(target), max(step, 1)):
            piece = target[start : start + step]
            self._read_into(piece, chunk.segment_offset + start)
            if chunk.crc32c is not None:
                began_s = time.perf_counter()
                computed = crc32c_of(piece, computed)
                verify_s += time.perf_counter() - began_s
        _verify(chunk, computed)
        return verify_s

    def read(self, chunk: SegmentChunk) -> bytearray:
        """The bytes of a piece. Raises as `copy`."""
        data = bytearray(chunk.length)
        self.copy(chunk, memoryview(data))
        return data

    def close(self) -> None:
        """Closes the memory. Safe to call more than once."""
        self._mapped = None
        if self._fd != -1:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _read_into(self, piece: memoryview, position: int) -> None:
        if self._mapped is not None and piece:
            # Only readers need numpy.
            import numpy as np

            there = self._mapped[position : position + len(piece)]
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(there, np.uint8))
            return
        while piece:
            num_read = os.preadv(self._fd, [piece], position)
            if num_read == 0:
                raise _shortened(self.path)
            piece, position = piece[num_read:], position + num_read


def _map(fd: int) -> memoryview | None:
    """The mapped memory, if its size cannot change; None = it must be read."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS:
            return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        return None
    except (OSError, ValueError):  # a file system without seals, or empty
        return None


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


def _is_descriptor(path: str) -> bool:
    """A link below /proc is a door to the file itself; everywhere else a link may lead anywhere."""
    return path.startswith("/proc/")


def _stat(path: str) -> os.stat_result:
    return os.stat(path, follow_symlinks=_is_descriptor(path))


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_dev not in _devices():
        raise _refused("is not shared memory")
    if found.st_uid != os.geteuid():
        raise _refused("does not belong to the daemon's user")


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
