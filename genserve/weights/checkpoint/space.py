"""The files of a checkpoint as one byte space: the tensors end to end in order of their names."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from genserve.errors import NotResidentError
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.resident import CHANGED


class CheckpointSpace:
    """The byte space of `manifest`. Any thread may read it."""

    def __init__(self, checkpoint: CheckpointIndex, files: CheckpointFiles) -> None:
        self.files = files
        self.manifest = checkpoint.as_manifest()
        self._tensors = [checkpoint.tensors[spec.name] for spec in self.manifest.tensors]
        self._offsets = [spec.offset for spec in self.manifest.tensors]

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on, tensor by tensor. Raises CheckpointFileError."""
        files, end = self.files.by_path, start + len(target)
        index = max(0, bisect_right(self._offsets, start) - 1)
        while target:
            tensor, offset = self._tensors[index], self._offsets[index]
            num_bytes = max(0, min(end, offset + tensor.length) - start)
            if num_bytes:
                files[tensor.path].read_into(tensor.position + start - offset, target[:num_bytes])
                start, target = start + num_bytes, target[num_bytes:]
            index += 1


class CheckpointBytes:
    """A ByteSource: the files of the checkpoint that the engine has loaded."""

    def __init__(self, space: CheckpointSpace) -> None:
        self.held_bytes = 0  # the kernel caches pages of files, and drops them as it needs
        self._space: CheckpointSpace | None = space

    def check(self) -> None:
        """Checks every file."""
        with self._unchanged() as space:
            space.files.check()

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), read."""
        data = memoryview(bytearray(end - start))
        self.read_into(start, data)
        return data

    def read_into(self, start: int, target: memoryview) -> None:
        """From the files."""
        with self._unchanged() as space:
            space.read_into(start, target)

    @contextmanager
    def _unchanged(self) -> Iterator[CheckpointSpace]:
        if self._space is None:
            raise ValueError("closed")
        try:
            yield self._space
        except CheckpointFileError as error:
            raise NotResidentError(
                f"the bytes of the served version {CHANGED} ({error}): push a complete version"
            ) from error

    def close(self) -> None:
        """Closes the files, each when nobody reads it any more."""
        self._space = None
