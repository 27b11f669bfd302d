"""Files that others replace while we run: whether they have changed, and what they hold now."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from genserve.observe.notices import say

T = TypeVar("T")

_INTERVAL_S: Final = 1.0


class WatchedFiles:
    """Some files, looked at once per second at most, and only when somebody asks. What replaces a file may do it by
    renaming, by a symbolic link, as Kubernetes does, or by writing over it."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(path for path in paths if path)
        self._seen = self._stamps()
        self._next_look_s = time.monotonic() + _INTERVAL_S
        self._failed = False
        self._failure: tuple[Any, str] | None = None

    def have_changed(self) -> bool:
        """Whether one has changed since the last call that said so, or what they hold could not be used then."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _INTERVAL_S
        stamps = self._stamps()
        if stamps == self._seen and not self._failed:
            return False
        self._seen, self._failed = stamps, False
        return True

    def failed(self, failure: str) -> bool:
        """Records that what they hold cannot be used, which may pass without a change of theirs, as when there are no
        descriptors left. Returns whether nobody has been told yet."""
        told, self._failure = self._failure, (self._seen, failure)
        self._failed = True
        return told != self._failure

    def _stamps(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_stamp(path) for path in self._paths)


class WatchedContent(Generic[T]):
    """What some files hold, as `read` makes it of them. Files for which it raises ValueError change nothing: what they
    held before stays, which `stays` says on stderr after the reason."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T], stays: str) -> None:
        """Raises what `read` raises."""
        self._watched = WatchedFiles(paths)
        self._read = read
        self._stays = stays
        self.content = read()

    def refresh(self) -> bool:
        """Reads files that have changed. Returns whether `content` is new."""
        if not self._watched.have_changed():
            return False
        try:
            self.content = self._read()
        except ValueError as error:
            if self._watched.failed(str(error)):
                say(f"warning: {error}. {self._stays}")
            return False
        return True


def read_bounded(path: str, max_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError for another kind, and ValueError for one that is larger."""
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not os.path.isfile(path):
            raise OSError(f"{path} is not a file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes")
    return content


def _stamp(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return ()
    # The last one changes with the owner and the mode, too, and nobody can set it back.
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns
