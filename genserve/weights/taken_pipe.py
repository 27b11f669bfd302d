"""The pipe of a trainer on the same host that is told which pieces of its memory are not needed any more."""

import os
import re
import stat

from genserve.errors import InvalidFieldError

_PATH = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")


class TakenPipe:
    """The writing end of a pipe of this user."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: str, memory_path: str) -> "TakenPipe":
        """Raises InvalidFieldError for "segment.taken_path" when it is anything else, nobody reads it, or another
        process has it than the one that hands the memory over: a pipe does not say what it is for."""
        if _PATH.fullmatch(path) is None:
            raise _refused("must be /proc/PID/fd/FD")
        if path.rpartition("/")[0] != memory_path.rpartition("/")[0]:
            raise _refused(f"must be of the process that has the memory, which is {memory_path}")
        try:
            _check(os.stat(path))  # before opening: a device might act on that
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise _refused(f"cannot be opened by the daemon: {error.strerror}") from error
        try:
            _check(os.fstat(fd))  # what was opened may be another file than what was looked at
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def tell(self) -> None:
        """Another piece has been taken. Raises InvalidFieldError when nobody reads it."""
        try:
            os.write(self._fd, b"\0")
        except OSError as error:
            raise _refused(f"is not read: {error.strerror}") from error

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._fd)


def _check(found: os.stat_result) -> None:
    if not stat.S_ISFIFO(found.st_mode):
        raise _refused("is no pipe")
    if found.st_uid != os.geteuid():
        raise _refused("belongs to another user than the daemon's")


def _refused(why: str) -> InvalidFieldError:
    return InvalidFieldError.of("segment.taken_path", why)
