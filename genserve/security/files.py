"""The files that connections need: their paths, whether others have replaced them while we run, and what they hold
now."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from genserve.observe.notices import say


class CertificateError(ValueError):
    """A certificate, a key, or both together are invalid. The message names the flags."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files. `certfile` has the certificate with its chain, and the key, too, if there is no `keyfile`.
    `ca_certs` has the authorities of clients; with `requires_clients`, a client without a certificate of theirs cannot
    connect."""

    certfile: str
    keyfile: str = ""
    ca_certs: str = ""
    requires_clients: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(path for path in (self.certfile, self.keyfile, self.ca_certs) if path)


@dataclass(frozen=True, slots=True)
class CallerFiles:
    """Paths, "" = none. `ca_file`: the authorities of servers, instead of those of the system; `cert_file`: our own
    certificate with its chain, and its key if there is no `key_file`; `token_file`: holds the token alone.
    `server_name`: what the certificate of a server must name, if that is not the host in its address. `tls`: whether
    to use TLS; the files of certificates imply it. `allow_insecure`: send the token unencrypted, too."""

    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    token_file: str = ""
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        if self.key_file and not self.cert_file:
            raise CertificateError(f"{self.key_file} is the key of no certificate: name its certificate, too")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls or bool(self.ca_file or self.cert_file)

    @property
    def certificate_paths(self) -> tuple[str, ...]:
        """The files that a connection needs."""
        return tuple(path for path in (self.ca_file, self.cert_file, self.key_file) if path)


PLAINTEXT: Final = CallerFiles()


T = TypeVar("T")

LOOK_EVERY_S: Final = 1.0


class WatchedFiles:
    """Some files, looked at once per second at most, and only when somebody asks. What replaces a file may do it by
    renaming, by a symbolic link, as Kubernetes does, or by writing over it."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(path for path in paths if path)
        self._seen = self._stamps()
        self._next_look_s = time.monotonic() + LOOK_EVERY_S
        self._failed = False
        self._failure: tuple[Any, str] | None = None

    def have_changed(self) -> bool:
        """Whether one has changed since the last call that said so, or what they hold could not be used then."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
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
