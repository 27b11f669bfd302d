"""The files of a checkpoint as one byte space: the tensors end to end in order of their names."""

from bisect import bisect_right

from genserve.weights.checkpoint import CheckpointIndex
from genserve.weights.checkpoint_files import CheckpointFiles


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
