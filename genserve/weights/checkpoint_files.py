"""The files of a checkpoint, held open as they were found: what is read from one is what it held then, or an error.

Whoever saves over a checkpoint writes new files and renames them, and those that are held stay as they were; or writes
in place, which shows in size and time of modification. No file is mapped: a page of one that was shortened is a SIGBUS.
"""

import json
import os
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

_Stamp: TypeAlias = tuple[int, int, int, int]


class CheckpointError(ValueError):
    """The checkpoint cannot be read; the message names the file."""


class FileChangedError(CheckpointError):
    """A file was written to since it was opened; the message names it."""


class CheckpointFile:
    """A file, open for reading as long as this object lives. Its methods may be called in any thread.

    A write is noticed unless it happens within the file system's resolution of time (a few milliseconds) after the
    writes before the file was opened, or somebody sets the time back.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        # With the object and not before: a thread that still reads holds it, and the descriptor's number stays taken.
        weakref.finalize(self, os.close, self._fd).atexit = False
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: is not a file")
        self.size_bytes = found.st_size
        self._found = _stamp(found)

    def check(self) -> None:
        """Raises FileChangedError."""
        if _stamp(os.fstat(self._fd)) != self._found:
            raise FileChangedError(f"{self.path}: has changed since it was opened")

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it, unchanged."""
        try:
            return _stamp(os.stat(self.path)) == self._found
        except OSError:
            return False

    def read_into(self, position: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `position` on; releases the GIL. Raises FileChangedError, and
        CheckpointError for what cannot be read."""
        rest = target
        while rest:
            try:
                num_read = os.preadv(self._fd, [rest], position)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror}") from error
            if num_read == 0:
                break
            rest, position = rest[num_read:], position + num_read
        self.check()  # afterwards: what was read before a change is as good as if there had been none
        if rest:
            raise CheckpointError(f"{self.path}: ends {len(rest)} bytes too early")

    def read(self, position: int, length: int) -> bytes:
        """The bytes [position, position + length). Raises as `read_into`."""
        data = bytearray(length)
        self.read_into(position, memoryview(data))
        return bytes(data)


class CheckpointFiles:
    """The safetensors files of one checkpoint, by their paths."""

    def __init__(self, paths: Iterable[Path], directory: Path | None = None) -> None:
        """Raises CheckpointError."""
        self.directory = directory
        self._files = {path: CheckpointFile(path) for path in paths}

    @classmethod
    def open(cls, directory: Path) -> "CheckpointFiles":
        """Those that the index in `directory` names, or that lie there. Raises CheckpointError."""
        return cls(_paths(directory), directory)

    @property
    def by_path(self) -> Mapping[Path, CheckpointFile]:
        """All of them."""
        return self._files

    def check(self) -> None:
        """Raises FileChangedError if one was written to."""
        for file in self._files.values():
            file.check()

    def check_in_place(self) -> None:
        """Raises CheckpointError unless whoever has opened them by their paths, at any time from when they were opened
        here until now, has read the same bytes."""
        for file in self._files.values():
            if not file.is_in_place:
                raise FileChangedError(f"{file.path}: has changed or was replaced since it was opened")
        if self.directory is not None and set(_paths(self.directory)) != self._files.keys():
            raise FileChangedError(f"{self.directory}: has other files than before")


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return content


def _paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index}: names a file outside of its directory")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no safetensors file found")
    return files


def _stamp(found: os.stat_result) -> _Stamp:
    # Not the time of the last change of the inode: to unlink or rename a file sets it, and its bytes stay.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
