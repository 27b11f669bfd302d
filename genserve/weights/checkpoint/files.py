"""The open files of a checkpoint: a read returns what the file contained when it was opened, or an error.

Saving over a checkpoint either writes new files and renames them, which does not change the open ones, or writes in
place, which changes size or modification time. Files are not mapped, because a page of a shortened file would be a
SIGBUS.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from genserve.tensors.safetensors import CheckpointFileError, read_weight_map

_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096
_Stamp: TypeAlias = tuple[int, int, int, int]


class FileChangedError(CheckpointFileError):
    """A file was written to since it was opened. The message names it."""


class CheckpointFile:
    """A file that is open for reading as long as this object lives. Any thread may call its methods.

    A write is detected unless it happens within the file system's time resolution (a few milliseconds) of the writes
    before the file was opened, or somebody sets the time back.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises CheckpointFileError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointFileError(f"{path}: {error.strerror}") from error
        # Closed with the object, not earlier: a reading thread holds the object, so the descriptor's number stays
        # taken.
        weakref.finalize(self, os.close, self._fd).atexit = False
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointFileError(f"{path}: is not a file")
        self.size_bytes = found.st_size
        self.stamp = _stamp(found)

    def check(self) -> None:
        """Raises FileChangedError if the file was written to."""
        if _stamp(os.fstat(self._fd)) != self.stamp:
            raise FileChangedError(f"{self.path}: has changed since it was opened")

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this file, unchanged."""
        try:
            return _stamp(os.stat(self.path)) == self.stamp
        except OSError:
            return False

    def read_into(self, position: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `position` on; releases the GIL. Raises FileChangedError, and
        CheckpointFileError if it cannot be read."""
        rest = target
        while rest:
            try:
                num_read = os.preadv(self._fd, [rest], position)
            except OSError as error:
                raise CheckpointFileError(f"{self.path}: {error.strerror}") from error
            if num_read == 0:
                break
            rest, position = rest[num_read:], position + num_read
        self.check()  # checked afterwards: bytes that were read before a change are valid
        if rest:
            raise CheckpointFileError(f"{self.path}: ends {len(rest)} bytes too early")

    def read(self, position: int, length: int) -> bytes:
        """The bytes [position, position + length). Raises as `read_into`."""
        data = bytearray(length)
        self.read_into(position, memoryview(data))
        return bytes(data)


class CheckpointFiles:
    """The safetensors files of one checkpoint, by their paths."""

    def __init__(self, paths: Iterable[Path], directory: Path | None = None) -> None:
        """Opens the files. Raises CheckpointFileError."""
        self.directory = directory
        self._files = {path: CheckpointFile(path) for path in paths}

    @classmethod
    def open(cls, directory: Path) -> "CheckpointFiles":
        """Opens the files that the index in `directory` names, or that are in it. Raises CheckpointFileError."""
        return cls(_paths(directory), directory)

    @property
    def by_path(self) -> Mapping[Path, CheckpointFile]:
        """All files."""
        return self._files

    @property
    def identity(self) -> str:
        """Equal for the same files with the same contents; another text after one was written to or replaced."""
        stamps = sorted((str(path), file.stamp) for path, file in self._files.items())
        return f"files {hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]}"

    def samples_digest(self) -> str:
        """Tells checkpoints apart without reading all of them: a digest of their sizes and of samples all over each
        file. Training changes every sample. "" if they cannot be read. Call it in a thread."""
        sha256 = hashlib.sha256()
        try:
            for _, file in sorted(self._files.items()):
                sha256.update(f"{file.size_bytes}\n".encode())
                for number in range(_NUM_SAMPLES):
                    position = number * max(0, file.size_bytes - _SAMPLE_BYTES) // max(1, _NUM_SAMPLES - 1)
                    sha256.update(file.read(position, min(_SAMPLE_BYTES, file.size_bytes)))
        except CheckpointFileError:
            return ""
        return sha256.hexdigest()[:32]

    def check(self) -> None:
        """Raises FileChangedError if one was written to."""
        for file in self._files.values():
            file.check()

    def check_in_place(self) -> None:
        """Raises CheckpointFileError unless everybody who opened the files by their paths since they were opened here
        has read the same bytes."""
        for file in self._files.values():
            if not file.is_in_place:
                raise FileChangedError(f"{file.path}: has changed or was replaced since it was opened")
        if self.directory is not None and set(_paths(self.directory)) != self._files.keys():
            raise FileChangedError(f"{self.directory}: has other files than before")


def _paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return [directory / name for name in sorted(set(read_weight_map(index).values()))]
        except OSError as error:
            raise CheckpointFileError(f"{index}: {error.strerror}") from error
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"{directory}: no safetensors file found")
    return files


def _stamp(found: os.stat_result) -> _Stamp:
    # Not the change time of the inode: unlinking or renaming a file changes it, but not the bytes.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
