"""The pipe on which the owner of shared memory gets an acknowledgement for each piece that was copied."""

import asyncio
import os
import re
import stat
from typing import ClassVar

from genserve.errors import InvalidFieldError
from genserve.memory.daemon_processes import DaemonProcesses, FileId, file_id

_PATH = re.compile(r"/proc/([1-9][0-9]{0,9})/fd/[0-9]{1,9}")


class AckPipe:
    """The writing end of a pipe of this user."""

    _opened: ClassVar[set[int]] = set()
    """Open descriptors. They do not make a pipe the daemon's own, because streams may share a pipe."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._file_id = file_id(os.fstat(fd))
        self._opened.add(fd)

    @classmethod
    async def open(cls, path: str, memory_path: str, daemon: DaemonProcesses | None) -> "AckPipe":
        """Raises InvalidFieldError for "segment.taken_path" when it is anything else, nobody reads it, it is named in
        another process than the memory, or a process of the `daemon` has it open: a pipe does not say what it is for,
        and vLLM's own pipes end the engine when they are written to. None = the owner is a process of the daemon's."""
        matched = _PATH.fullmatch(path)
        if matched is None:
            raise _refused("must be /proc/PID/fd/FD")
        if path.rpartition("/")[0] != memory_path.rpartition("/")[0]:
            raise _refused(f"must belong to the process that owns the memory {memory_path}")
        try:
            if daemon is not None and daemon.include(int(matched[1])):
                raise _refused("belongs to one of the daemon's own processes")
            wanted = _checked(os.stat(path))  # checked before opening: a device might act on an open
            if daemon is not None:
                await asyncio.to_thread(cls._refuse_own, wanted, daemon)
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise _refused(f"cannot be opened by the daemon: {error.strerror}") from error
        try:
            if _checked(os.fstat(fd)) != wanted:
                raise _refused("was replaced while it was opened")
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _refuse_own(cls, wanted: FileId, daemon: DaemonProcesses) -> None:
        """Refuses the daemon's own pipes. A trainer that started the daemon may have the other end of one, for example
        of its standard input."""
        for pid, fd in daemon.descriptors_of(wanted):
            if pid != os.getpid() or fd not in cls._opened:
                raise _refused("is also open in one of the daemon's own processes")

    def is_at(self, path: str) -> bool:
        """Whether this is still what the path names: see `Segment.is_at`."""
        try:
            return self.path == path and file_id(os.stat(path)) == self._file_id
        except OSError:
            return False  # opening it raises the reason

    def acknowledge(self) -> None:
        """Says that another piece has been copied. Raises InvalidFieldError when nobody reads it."""
        try:
            os.write(self._fd, b"\0")
        except OSError as error:
            raise _refused(f"is not read: {error.strerror}") from error

    def close(self) -> None:
        """Closes the pipe."""
        self._opened.discard(self._fd)
        os.close(self._fd)


def _checked(found: os.stat_result) -> FileId:
    if not stat.S_ISFIFO(found.st_mode):
        raise _refused("is not a pipe")
    if found.st_uid != os.geteuid():
        raise _refused("does not belong to the daemon's user")
    return file_id(found)


def _refused(why: str) -> InvalidFieldError:
    return InvalidFieldError.of("segment.taken_path", why)
