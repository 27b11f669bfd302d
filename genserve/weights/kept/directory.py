"""The directory of --keep-committed: the served version and the one before it, as checkpoints.

    current/     the version that was kept last: its files, and RECORD, which is written when all others are on disk
    previous/    the one that it has replaced
    writing/     the next one. With its RECORD it is whole, and a start that finds it moves it to its place
    removing/    what is not needed any more

Only names change when a version is replaced, so a crash at any moment leaves a whole one. One daemon has a directory.
"""

import fcntl
import json
import os
import shutil
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from genserve.errors import InvalidFieldError
from genserve.weights.push.types import MAX_VERSION
from genserve.wire.bounds import check_text

RECORD: Final = "genserve.json"
_FORMAT: Final = 1
_LOCK: Final = ".lock"
_EPOCHS: Final = range(1 << 63)  # a router numbers its changes above it, in 64 bits


class KeptError(ValueError):
    """The contents of the directory cannot be used. The message names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """The facts that a checkpoint's own files do not have. `push_id`: of the push that brought the version.
    `content_digest`: of the tensors in the files. `fleet_epoch`: in which a router has written down that its fleet
    serves the version; 0 = none has."""

    weight_version: int
    push_id: str
    content_digest: str
    fleet_epoch: int = 0

    def to_json(self) -> str:
        """One object."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record that `to_json` has written. Raises KeptError."""
        try:
            found: Any = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, str(error)) from error
        match found:
            case {"format": int(number)} if number != _FORMAT:
                raise _unreadable(path, f"has format {number}, this genserve knows {_FORMAT}")
            case {
                "format": int(),
                "weight_version": int(version),
                "push_id": str(push_id),
                "content_digest": str(digest),
            } if version > 0 and digest and type(epoch := found.get("fleet_epoch", 0)) is int and epoch in _EPOCHS:
                return cls(version, push_id, digest, epoch)
        raise _unreadable(path, "lacks a field, or has another type there")


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A whole checkpoint."""

    path: Path
    record: KeptRecord


class KeptDirectory:
    """The directory of one daemon, which nobody else writes to. Its methods block for the time of a rename, or of
    removing a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if there is none, and puts in order what a crash has left. Raises KeptError if another
        daemon has it, and OSError."""
        self.path = path
        self._take()
        self.settle()

    def _take(self) -> None:
        """Raises KeptError if another daemon has the directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        # A lock of this process, which a child that is forked does not hold on to.
        self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._unlocking = weakref.finalize(self, os.close, self._lock_fd)
        self._unlocking.atexit = False
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KeptError(
                f"{self.path}: another daemon keeps its version there: give each its own directory"
            ) from error

    def _keep_taken(self) -> None:
        """Takes the directory anew if somebody has removed it, or moved it away. Raises as `_take`."""
        try:
            if os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self._lock_fd)):
                return
        except OSError:
            pass
        self._unlocking()
        self._take()

    @property
    def latest(self) -> KeptVersion | None:
        """The version that was kept last; if somebody has moved it away, the one before. Raises KeptError."""
        return self._kept("current") or self._kept("previous")

    def before(self, push_id: str) -> KeptVersion | None:
        """The version that was kept last before the one that this push has brought. Raises KeptError."""
        latest = self.latest
        if latest is not None and latest.record.push_id == push_id:
            return self._kept("previous") if latest.path.name == "current" else None
        return latest

    def _kept(self, name: str) -> KeptVersion | None:
        path = self.path / name
        if not os.path.lexists(path):
            return None
        record = KeptRecord.read(path / RECORD)
        _check_told(record, path / RECORD)
        return KeptVersion(path, record)

    @property
    def writing(self) -> Path:
        """Where the files of the next version are, between `begin` and `finish`."""
        return self.path / "writing"

    def begin(self) -> Path:
        """An empty directory for the files of the next version. Raises KeptError if another daemon has come here since
        somebody has removed what was here."""
        self._keep_taken()
        self.settle()
        self.writing.mkdir()
        return self.writing

    def finish(self, record: KeptRecord) -> None:
        """Makes the version that was begun the current one; its files are on disk already."""
        _write_record(self.writing, record)
        self.settle()

    def note(self, record: KeptRecord) -> None:
        """Replaces the record of the current version."""
        _write_record(self.path / "current", record)

    def settle(self) -> None:
        """Moves what was begun to its place if it is whole, and removes it otherwise, and what is not needed any
        more."""
        if (self.writing / RECORD).exists():
            self._replace()
        for path in (self.writing, self._removing):
            _remove(path)

    @property
    def _removing(self) -> Path:
        return self.path / "removing"

    def _replace(self) -> None:
        """Each step leaves what the next start, or the next call, goes on from."""
        current, previous = self.path / "current", self.path / "previous"
        _remove(self._removing)
        if os.path.lexists(current):
            if os.path.lexists(previous):
                previous.rename(self._removing)
            current.rename(previous)
        self.writing.rename(current)
        sync(self.path)


def _remove(path: Path) -> None:
    """With what is in it. What a link leads to belongs to whoever has made the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _check_told(record: KeptRecord, path: Path) -> None:
    """Raises KeptError for what no answer of a daemon could tell, of a file that somebody has edited."""
    if record.weight_version > MAX_VERSION:
        raise _unreadable(path, f"weight_version is {record.weight_version}, above {MAX_VERSION}")
    try:
        check_text(record.push_id, "push_id")
    except InvalidFieldError as error:
        raise _unreadable(path, error.message) from error


def _write_record(directory: Path, record: KeptRecord) -> None:
    unfinished = directory / f"{RECORD}.unfinished"
    unfinished.unlink(missing_ok=True)  # a crash may have left it
    write_through(unfinished, record.to_json().encode())
    unfinished.rename(directory / RECORD)
    sync(directory)


def write_through(path: Path, data: bytes) -> None:
    """Writes a small file, and returns when it is on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Returns when the names in a directory are on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unreadable(path: Path, why: str) -> KeptError:
    return KeptError(f"{path}: {why}: move {path.parent} away to serve without it")
